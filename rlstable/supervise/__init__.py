"""Host-side decisions that keep a run alive: recovery, precision, memory, signals, incidents."""
