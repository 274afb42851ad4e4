"""Files and console of a run: checkpoints, metrics, events."""
