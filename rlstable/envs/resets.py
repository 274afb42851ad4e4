"""Clean first states from a small separate program: environments start from them, and the quarantine draws them."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import jax
import numpy as np

from rlstable.compilation import host_keys
from rlstable.compilation.compiler import Compiler
from rlstable.compilation.ffi import interruptible
from rlstable.config import ConfigError
from rlstable.device.packed import PackedRows, concatenate
from rlstable.device.shared import for_devices, map_rows, without_shared
from rlstable.device.trees import EnvState
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.guards.env import ACCELERATIONS, COORDINATES, Quarantine, named, physics

_ATTEMPTS = 10
_MIN_CLEAN_SHARE = 0.01
_NAME = "resets"


class Resets:
    """Draws first states in small batches and, with env guards, drops the bad ones.

    Without guards bad states are kept, as in Brax. If almost no state is clean, `draw` raises an error in either case.
    `program` is a jitted function from a random key to `(states, clean)`.
    """

    def __init__(self, env: VectorEnv, batch: int, compiler: Compiler | None = None, devices: int = 1):
        self._compiler = compiler or Compiler()
        self._precision = precision = self._compiler.precision
        guarded = env if env.guards else dataclasses.replace(env, guards={"quarantine": Quarantine()})

        def program(key: jax.Array) -> tuple[EnvState, jax.Array]:
            with precision.narrow():
                states = env.reset(jax.random.split(key, batch))
                return states, guarded.clean(states)

        self.program = jax.jit(program)
        self._env, self._batch, self._devices = env, batch, devices
        self._built: Future[jax.stages.Compiled] | None = None

    def begin(self) -> Future[jax.stages.Compiled]:
        """Starts to build the program, once; the result of the future is the compiled program."""
        if self._built is None:
            self._built = self._compiler.build(_NAME, self.program, lambda: (host_keys.shape(),), rarely_used=True)
        return self._built

    def shapes(self, count: int) -> EnvState:
        """Shapes and types of `count` first states; traces the program at most once."""
        outputs = self._compiler.outputs(_NAME)
        if outputs is None:
            with self._precision.compiled():
                outputs = jax.eval_shape(self.program, host_keys.shape())
        states = map_rows(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), outputs[0])
        return for_devices(states, self._devices)

    def draw(self, key: jax.Array, count: int) -> EnvState:
        """`count` first states on the host, clean with guards; a `ConfigError` if almost no reset gives a clean one."""
        program = self.begin().result()
        parts: list[EnvState] = []
        clean_count = drawn = selected_count = 0
        while selected_count < count or clean_count == 0:
            key, batch_key = host_keys.split(key)
            with self._precision.compiled(), interruptible():
                states, clean = jax.device_get(program(batch_key))
            drawn += self._batch
            clean_count += int(clean.sum())
            if drawn >= _ATTEMPTS * self._batch and clean_count < _MIN_CLEAN_SHARE * drawn:
                raise ConfigError(
                    f"env.name: {clean_count or 'none'} of {drawn} resets gave a usable first state: "
                    f"{self._first_problem(states)}; "
                    "mend the environment's reset, or raise the limits under guards.quarantine"
                )
            selected = clean if self._env.guards else np.ones_like(clean)
            selected_count += int(selected.sum())
            parts.append(map_rows(lambda x, selected=selected: x[selected], states))
        return for_devices(map_rows(lambda *x: concatenate(x)[:count], *parts), self._devices)

    def pool(self, key: jax.Array, count: int) -> PackedRows:
        return pool_of(self.draw(key, count))

    def _first_problem(self, states: EnvState) -> str:
        """The range of the first element that is not finite or beyond a limit of the quarantine, and the limit."""
        simulated = physics(without_shared(states))
        for what, part, key in (
            ("obs", states.obs, "max_abs_observation"),
            ("reward", states.reward, "max_abs_reward"),
            ("state", named(simulated, COORDINATES), "max_abs_state"),
            ("acceleration", named(simulated, ACCELERATIONS), "max_abs_acceleration"),
        ):
            limit = getattr(self._env.guards.get("quarantine"), key, None) or np.finfo(np.float32).max
            for path, leaf in jax.tree.leaves_with_path(part):
                numbers = np.reshape(np.asarray(leaf, float), (len(leaf), -1)).T
                for index, own in enumerate(numbers):
                    if not (np.abs(own) <= limit).all():
                        place = f"{what}{jax.tree_util.keystr(path)}" + (f"[{index}]" if leaf.ndim > 1 else "")
                        if not np.isfinite(own).all():
                            return f"{place} is not finite"
                        return f"{place} is {own.min():g} to {own.max():g}, beyond guards.quarantine.{key}={limit:g}"
        return "another part of its state is not finite, or beyond guards.quarantine.max_other_norm"
