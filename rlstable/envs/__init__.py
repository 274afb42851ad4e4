"""Environments: loading, vectorising, automatic reset, quarantine, and C MuJoCo physics."""
