"""rlstable: PPO on Brax and MuJoCo-MJX environments that does not blow up.

`fit` trains, `load_policy` loads what was trained; the command is `python -m rlstable.train`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["ConfigError", "NonFiniteAction", "Policy", "Result", "WideCounter", "__version__", "fit", "load_policy"]

_HOMES = {
    "ConfigError": "rlstable.config",
    "NonFiniteAction": "rlstable.policy.policy",
    "Policy": "rlstable.policy",
    "Result": "rlstable.runner.result",
    "WideCounter": "rlstable.device.counter",
    "fit": "rlstable.api",
    "load_policy": "rlstable.policy",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for: `--help` must not wait for jax."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
