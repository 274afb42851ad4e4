"""Pages about runs: what they learnt, what happened to them, and in what they differ."""
