"""The function of JAX that Brax's trainer calls and JAX 0.10 dropped."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def device_put_replicated(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """Copies every leaf to each device, on a leading axis, as the function did that JAX dropped."""
    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))
    return jax.tree.map(lambda leaf: jax.device_put(jnp.stack([jnp.asarray(leaf)] * len(devices)), sharding), tree)
