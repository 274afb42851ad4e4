"""Exports policies for programs without rlstable: ONNX, and StableHLO by `jax.export`."""
