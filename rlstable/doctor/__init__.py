"""Checks of this machine and this model before a run: `python -m rlstable.doctor env=humanoid`."""
