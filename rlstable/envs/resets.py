"""Clean first states: a small program of its own, from which environments start and bad ones are replaced."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from rlstable import background
from rlstable.config import ConfigError
from rlstable.envs.foreign import interruptible
from rlstable.envs.wrappers import VectorEnv, pool_of
from rlstable.guards.env import Quarantine
from rlstable.packed import Rows, joined
from rlstable.precision import SINGLE, Precision

_ATTEMPTS = 10
_LEAST_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class Resets:
    """Draws first states in small batches. Where environments are guarded the bad ones are left out.

    Without guards they are kept, as in Brax; but an environment of which hardly any state is clean cannot be trained
    in, and that is said whatever guards there are.

    Attributes:
        env: The environments.
        batch: First states that one call of the program makes.
        program: The compiled program, key to (states, clean).
        precision: What it is compiled in.
    """

    env: VectorEnv
    batch: int
    program: jax.stages.Wrapped
    precision: Precision

    def begin(self, key: jax.Array) -> Future[Any]:
        """Has the program compiled by another thread.

        Args:
            key: A random key like those that are drawn with.

        Returns:
            What is to be waited for before drawing.
        """
        with self.precision.compiled():
            return background.build(self.program.lower(key).compile)

    def shapes(self, count: int) -> Any:
        """Shapes and types of `count` first states, which are traced once for that and for drawing."""
        with self.precision.compiled():
            states, _ = jax.eval_shape(self.program, jax.random.PRNGKey(0))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), states)

    def draw(self, key: jax.Array, count: int) -> Any:
        """`count` clean first states, on the host.

        Args:
            key: Random key; the states depend on nothing else.
            count: How many.

        Raises:
            ConfigError: Hardly any reset is clean; what was bad is named.
        """
        parts: list[Any] = []
        found = drawn = kept = 0
        while kept < count or found == 0:
            key, own = jax.random.split(key)
            with self.precision.compiled(), interruptible():
                states, clean = jax.device_get(self.program(own))
            drawn += self.batch
            found += int(clean.sum())
            if drawn >= _ATTEMPTS * self.batch and found < _LEAST_SHARE * drawn:
                raise ConfigError(
                    f"env.name: {found or 'none'} of {drawn} resets gave a usable first state: "
                    f"{self._complaint(states)}; "
                    "mend the environment's reset, or raise the limits under guards.quarantine"
                )
            wanted = clean if self.env.guards else np.ones_like(clean)
            kept += int(wanted.sum())
            parts.append(jax.tree.map(lambda x, wanted=wanted: x[wanted], states))
        return jax.tree.map(lambda *x: joined(x)[:count], *parts)

    def pool(self, key: jax.Array, count: int) -> Rows:
        """`count` clean first states to draw from; arguments and errors as for `draw`."""
        return pool_of(self.draw(key, count))

    def _complaint(self, states: Any) -> str:
        for label, part in (("observation", states.obs), ("reward", states.reward), ("state", states)):
            leaves = [x for x in jax.tree.leaves(part) if np.issubdtype(np.asarray(x).dtype, np.floating)]
            if not all(np.isfinite(leaf).all() for leaf in leaves):
                return f"its {label} is not finite"
        return "it is beyond a limit"


def make_resets(
    env: VectorEnv, batch: int, precision: Precision = SINGLE, options: dict[str, Any] | None = None
) -> Resets:
    """The reset program for an environment, compiled when it is first called."""
    judging = env if env.guards else dataclasses.replace(env, guards={"quarantine": Quarantine()})

    def program(key: jax.Array) -> tuple[Any, jax.Array]:
        with precision.narrow():
            states = env.reset(jax.random.split(key, batch))
            return states, judging.clean(states)

    return Resets(env, batch, jax.jit(program, compiler_options=options), precision)
