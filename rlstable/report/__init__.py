"""HTML reports about runs and sweeps: curves, events and differences."""
