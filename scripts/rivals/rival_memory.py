"""What a rival's process has in memory; it stands alone, as the rivals' scripts do."""

from __future__ import annotations

from pathlib import Path


def memory_now_mb() -> float | None:
    """Memory of this process in the host, None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))
