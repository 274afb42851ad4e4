"""A trained policy: loading, evaluating and playing it."""
