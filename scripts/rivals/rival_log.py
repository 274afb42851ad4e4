"""Log lines and memory of a rival's process; imports nothing but the standard library, as the rivals' scripts must."""

import json
import time
from pathlib import Path
from typing import Any


class Reached(Exception):
    """An evaluation reached the threshold."""


def write_line(file: Any, **fields: Any) -> None:
    """Writes a line of JSON with the time."""
    print(json.dumps({"time": time.time(), **fields}), file=file)


def memory_now_mb() -> float | None:
    """Returns the host memory of this process; None where the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))
