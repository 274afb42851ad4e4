"""Traces, compiles and caches programs."""
