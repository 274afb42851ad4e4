"""Policies for programs that know nothing of rlstable: ONNX, and StableHLO by `jax.export`."""
