"""Environments: loading them, and the wrapper stack from the vmap up."""
