"""Cache folder of this user: compiled programs and the list of trusted run folders."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/rlstable`, or `~/.cache/rlstable`.

    Raises:
        RuntimeError: This user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlstable"
