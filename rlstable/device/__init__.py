"""Numbers and arrays on devices."""
