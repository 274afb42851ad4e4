"""Errors as text for events and messages."""


def one_line(error: Exception) -> str:
    """The type and the first 300 characters of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
