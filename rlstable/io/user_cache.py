"""Folder of this user's caches: compiled programs, and the run folders whose code may run."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/rlstable`, or `~/.cache/rlstable`.

    Raises:
        RuntimeError: This user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlstable"
