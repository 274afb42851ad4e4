"""Steps a bad simulation again: `python -m rlstable.replay <incident>`."""
