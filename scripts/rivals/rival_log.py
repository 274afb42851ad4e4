"""Log lines of a rival's process; imports nothing but the standard library, as the rivals' scripts must."""

import json
import time
from typing import Any


class Reached(Exception):
    """An evaluation reached the threshold."""


def write_line(file: Any, **fields: Any) -> None:
    print(json.dumps({"time": time.time(), **fields}), file=file)
