"""Makes MJX put its models on a device of this process, if several processes train one run."""

from __future__ import annotations

from typing import Any

import jax

from rlstable.compilation import compatibility


class _OwnDevices:
    """The module `jax` whose `devices` are those of this process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    @staticmethod
    def devices(backend: str | None = None) -> list[Any]:
        """The devices of this process."""
        return jax.local_devices(backend=backend)


def use_own_devices() -> None:
    """Must run before an environment is made. MJX (3.17) takes the first device of all processes, process 0's."""
    if jax.process_count() > 1:
        compatibility.mjx_io().jax = _OwnDevices()
