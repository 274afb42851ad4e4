"""How programs are traced, compiled and cached."""
