"""The host side of staying alive: going back and trying again, precision, memory, signals, incidents."""
