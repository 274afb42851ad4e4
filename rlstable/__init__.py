"""rlstable: PPO on Brax and MuJoCo-MJX environments that does not blow up.

`fit` trains a policy, `load_policy` loads a trained policy, and `gym_env` makes a Gymnasium environment. The command is
`python -m rlstable.train`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["ConfigError", "Listener", "Policy", "Result", "__version__", "fit", "gym_env", "load_policy"]

_MODULE_OF = {
    "ConfigError": "rlstable.config",
    "Listener": "rlstable.runner.listener",
    "Policy": "rlstable.policy.policy",
    "Result": "rlstable.runner.seeds",
    "fit": "rlstable.api",
    "gym_env": "rlstable.gym.make",
    "load_policy": "rlstable.policy.policy",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that `--help` does not import JAX."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
