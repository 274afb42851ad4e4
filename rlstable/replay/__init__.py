"""Replays the step of an incident: `python -m rlstable.replay <incident>`."""
