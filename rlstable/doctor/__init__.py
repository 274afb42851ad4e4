"""What this machine and this model are fit for: `python -m rlstable.doctor env=humanoid`."""
