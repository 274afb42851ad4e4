"""What a run reads and writes: checkpoints, metrics, events and the console."""
