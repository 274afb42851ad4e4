"""Clean first states, from a small separate program: environments start from them and bad ones are replaced."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from rlstable.compilation.ffi import interruptible
from rlstable.compilation.programs import Programs
from rlstable.config import ConfigError
from rlstable.device.packed import PackedRows, joined
from rlstable.device.precision import SINGLE, Precision
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.guards.env import Quarantine

_ATTEMPTS = 10
_MIN_CLEAN_SHARE = 0.01
_NAME = "resets"


class Resets:
    """Draws first states in small batches. Where environments are guarded the bad ones are left out.

    Without guards they are kept, as in Brax; but an environment of which hardly any state is clean cannot be trained
    in, and that is said whatever guards there are.

    Args:
        env: The environments.
        batch: First states that one call of the program makes.
        precision: What it is compiled in.
        programs: What builds it; None for the usual way.

    Attributes:
        program: The program that is compiled, key to (states, clean).
    """

    def __init__(
        self,
        env: VectorEnv,
        batch: int,
        precision: Precision = SINGLE,
        programs: Programs | None = None,
    ):
        judging = env if env.guards else dataclasses.replace(env, guards={"quarantine": Quarantine()})

        def program(key: jax.Array) -> tuple[Any, jax.Array]:
            with precision.narrow():
                states = env.reset(jax.random.split(key, batch))
                return states, judging.clean(states)

        self.program = jax.jit(program)
        self._env = env
        self._batch = batch
        self._precision = precision
        self._programs = programs or Programs(precision)
        self._built: Future[Any] | None = None

    def begin(self) -> Future[Any]:
        """Has the program built, once; what is given back is to be waited for before drawing."""
        if self._built is None:
            self._built = self._programs.build(_NAME, self.program, lambda: (jax.random.PRNGKey(0),), seldom=True)
        return self._built

    def shapes(self, count: int) -> Any:
        """Shapes and types of `count` first states, for which the program is traced at most once."""
        outputs = self._programs.outputs(_NAME)
        if outputs is None:
            with self._precision.compiled():
                outputs = jax.eval_shape(self.program, jax.random.PRNGKey(0))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), outputs[0])

    def draw(self, key: jax.Array, count: int) -> Any:
        """`count` clean first states, on the host.

        Args:
            key: Random key; the states depend on nothing else.
            count: How many.

        Raises:
            ConfigError: Hardly any reset is clean; what was bad is named.
        """
        program = self.begin().result()
        parts: list[Any] = []
        found = drawn = kept = 0
        while kept < count or found == 0:
            key, own = jax.random.split(key)
            with self._precision.compiled(), interruptible():
                states, clean = jax.device_get(program(own))
            drawn += self._batch
            found += int(clean.sum())
            if drawn >= _ATTEMPTS * self._batch and found < _MIN_CLEAN_SHARE * drawn:
                raise ConfigError(
                    f"env.name: {found or 'none'} of {drawn} resets gave a usable first state: "
                    f"{self._first_problem(states)}; "
                    "mend the environment's reset, or raise the limits under guards.quarantine"
                )
            wanted = clean if self._env.guards else np.ones_like(clean)
            kept += int(wanted.sum())
            parts.append(jax.tree.map(lambda x, wanted=wanted: x[wanted], states))
        return jax.tree.map(lambda *x: joined(x)[:count], *parts)

    def pool(self, key: jax.Array, count: int) -> PackedRows:
        """`count` clean first states to draw from; arguments and errors as for `draw`."""
        return pool_of(self.draw(key, count))

    def _first_problem(self, states: Any) -> str:
        for label, part in (("observation", states.obs), ("reward", states.reward), ("state", states)):
            leaves = [x for x in jax.tree.leaves(part) if np.issubdtype(np.asarray(x).dtype, np.floating)]
            if not all(np.isfinite(leaf).all() for leaf in leaves):
                return f"its {label} is not finite"
        return "it is beyond a limit"
