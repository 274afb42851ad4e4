"""How much is learned, task by task, beside published curves."""
