"""The host loop: setup, supervisor, seeds, logs and checkpoints."""
