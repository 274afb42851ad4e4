"""Trained policies that come with the package, and the command that shows them."""
