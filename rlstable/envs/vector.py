"""Vectorised environments: vmap, action repeat, episodes, automatic reset, quarantine, evaluation.

On healthy environments this is Brax's stack (VmapWrapper, EpisodeWrapper, AutoResetWrapper, EvalWrapper) step by
step; it is
the reference in the tests. Brax's own cannot stand around a quarantine: `EpisodeWrapper` overwrites `truncation`, a
later action repeat erases `done`, and `AutoResetWrapper` puts the cached first state over a clean one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.packed import PackedRows
from rlstable.device.transforms import apply_if
from rlstable.envs import capture
from rlstable.guards.base import Guard, GuardState, fold, select
from rlstable.guards.env import EnvContext, physics
from rlstable.ppo.rollout import Step
from rlstable.ppo.state import Slot

Policy = Callable[[Any, jax.Array], jax.Array]
_FIRST = ("first_pipeline_state", "first_obs")
_EPISODE = ("steps", "truncation", "time_out", "episode_done", "episode_metrics")


@dataclasses.dataclass(frozen=True)
class VectorEnv:
    """Many copies of an environment, stepped together.

    Attributes:
        env: One environment with Brax's Env interface.
        episode_length: Steps after which an episode is cut, action repeat included.
        action_repeat: Environment steps per action.
        guards: The env site's, by name; without any nothing is judged and nothing is traced for it.
        reset_from_pool: Whether ordinary episode ends draw a new first state; otherwise each environment keeps its own.
        per_pass: How many of them are stepped at once; None for all.
    """

    env: Any
    episode_length: int
    action_repeat: int
    guards: Mapping[str, Guard]
    reset_from_pool: bool = False
    per_pass: int | None = None

    @property
    def uses_pool(self) -> bool:
        """Whether anything is ever drawn from the pool of clean first states."""
        return self.reset_from_pool or bool(self.guards)

    def reset(self, keys: jax.Array) -> Any:
        """First states, `[B]` for `B` random keys, with the `info` entries that Brax's wrappers keep."""
        state = jax.vmap(self.env.reset)(keys)
        zeros = jnp.zeros(keys.shape[:1])
        first = {"first_pipeline_state": physics(state), "first_obs": state.obs}
        return state.replace(info={**state.info, **episode_entries(state.metrics, zeros), **first})

    def clean(self, state: Any) -> jax.Array:
        """Which first states are fit to start from, bool `[B]`."""
        alive = jnp.ones(state.reward.shape, bool)
        guard_state = {name: guard.init() for name, guard in self.guards.items()}
        context = EnvContext(state, jnp.zeros((*alive.shape, 1)), alive)
        return alive & fold(self.guards, context, guard_state).ok

    def empty_slot(self, state: Any, action_size: int, devices: int) -> Slot:
        """Empty slots for the first bad environment of every device, on the host.

        Args:
            state: Batched state, `[B]`; only its shapes are looked at.
            action_size: Elements of an action.
            devices: How many slots.
        """
        return capture.empty(self.guards, without_first_state(state), action_size, devices)

    def catch(self, incident: Slot, seen: capture.StepRecord, bad: jax.Array) -> Slot:
        """Puts the first bad environment into the slot if that is empty.

        Args:
            incident: This device's slot.
            seen: One step of every environment.
            bad: bool `[B]`, which went bad in it.
        """
        return capture.catch(incident, seen, bad)

    def step(
        self,
        state: Any,
        action: jax.Array,
        pool: Any,
        key: jax.Array,
        guard_state: dict[str, GuardState],
        incident: Slot | None = None,
    ) -> Step:
        """One step of every environment: act, count, and replace what is over or bad.

        A bad environment ends as a truncation with reward 0 and without a time-out bootstrap; its physics, observation,
        `info` and *cached first state* come from the pool.

        Args:
            state: Batched state, `[B]`.
            action: `[B, A]`.
            pool: `pool_of` clean first states, or None where `uses_pool` is false.
            key: Random key for what is drawn.
            guard_state: Of `guards`.
            incident: This device's slot for the first bad environment; None to catch none.
        """
        before = state.info
        state, ok, guard_state, incident = self._repeat_action(state, action, guard_state, incident, key)
        state = state.replace(info={**state.info, **self._episode(before, state, ok)})
        state = state.replace(done=jnp.where(self._time_is_up(state), 1.0, state.done))
        if ok is not None:
            state = _truncate_bad(state, ok)
        state = state.replace(info={**state.info, "episode_done": state.done})
        state = self._draw_first_states(state, ok, pool, key)
        state = _reset_finished(state)
        return Step(state, ok, guard_state, incident)

    def _repeat_action(
        self, state: Any, action: jax.Array, guard_state: Any, incident: Slot | None = None, key: Any = None
    ) -> tuple[Any, jax.Array | None, Any, Slot | None]:
        """Repeats the action. The verdict is sticky: a repeat that looks healthy again does not clear it."""
        kept = {name: state.info[name] for name in _FIRST}
        over = state.done
        start = without_first_state(state)
        steps = jnp.where(over > 0, 0.0, start.info["steps"])
        start = start.replace(done=jnp.zeros_like(over), info={**start.info, "steps": steps})
        alive = jnp.ones(over.shape, bool)

        def repeat(carry: Any, _: None) -> tuple[Any, jax.Array]:
            state, alive, guard_state, incident = carry
            stepped = _cast_like(self._step(state, action), state)
            context = EnvContext(stepped, action, alive)
            _, ok, judged = fold(self.guards, context, guard_state)
            if incident is not None:
                causes = capture.flags(self.guards, context, guard_state, judged)
                incident = self.catch(incident, capture.StepRecord(state, action, stepped, causes, key), alive & ~ok)
            return (stepped, alive if ok is True else alive & ok, judged, incident), stepped.reward

        carry = (start, alive, guard_state, incident)
        if self.action_repeat == 1:
            (state, alive, guard_state, incident), reward = repeat(carry, None)
        else:
            (state, alive, guard_state, incident), rewards = jax.lax.scan(
                repeat, carry, None, length=self.action_repeat
            )
            reward = jnp.sum(rewards, axis=0)
        state = state.replace(reward=reward, info={**state.info, "steps": start.info["steps"], **kept})
        return state, (alive if self.guards else None), guard_state, incident

    def _step(self, state: Any, action: jax.Array) -> Any:
        """One step of every environment, all at once or some after others."""
        if self.per_pass is None or self.per_pass >= action.shape[0]:
            return jax.vmap(self.env.step)(state, action)
        return _in_passes(self.env.step, (state, action), self.per_pass)

    def _episode(self, before: Any, state: Any, ok: jax.Array | None) -> dict[str, Any]:
        """Advances the episode's own bookkeeping, with the choices of Brax's EpisodeWrapper."""
        steps = state.info["steps"] + self.action_repeat
        truncation = jnp.where(steps >= self.episode_length, 1.0 - state.done, 0.0)
        fresh = before["episode_done"] > 0
        added = {"sum_reward": state.reward, "length": jnp.full_like(steps, self.action_repeat)} | {
            name: value for name, value in state.metrics.items() if name != "reward"
        }
        totals = dict(before["episode_metrics"])
        for name, value in added.items():
            value = value if ok is None else jnp.where(ok, value, 0.0)
            totals[name] = jnp.where(fresh, 0.0, totals[name]) + value
        return {"steps": steps, "truncation": truncation, "episode_metrics": totals}

    def _time_is_up(self, state: Any) -> jax.Array:
        return state.info["steps"] >= self.episode_length

    def _draw_first_states(self, state: Any, ok: jax.Array | None, pool: PackedRows | None, key: jax.Array) -> Any:
        """Gives environments another first state: the bad ones, and with `reset_from_pool` every one that is over.

        The rest of their `info` comes with it; of the bad ones the metrics too, which others are still to report.
        This is rare, so it is skipped while no environment needs it.
        """
        if pool is None:
            return state
        bad = jnp.zeros(state.done.shape, bool) if ok is None else ~ok
        wanted = (state.done > 0) if self.reset_from_pool else bad

        def draw(parts: Any) -> Any:
            index = jax.random.randint(jax.random.fold_in(key, 1), wanted.shape, 0, len(pool))
            drawn = pool.take(index)
            # Environments that drew the same row would see the same noise from then on.
            drawn["info"] = jax.tree.map(lambda own, new: own if _is_key(own) else new, parts["info"], drawn["info"])
            metrics = select(~bad, parts["metrics"], drawn["metrics"])
            return select(~wanted, parts, drawn) | {"metrics": metrics}

        parts = apply_if(jnp.any(wanted), draw, _pool_parts(state))
        return state.replace(info={**state.info, **parts["info"], **parts["first"]}, metrics=parts["metrics"])


def episode_entries(metrics: Mapping[str, Any], zeros: Any) -> dict[str, Any]:
    """The entries of `info` that count an episode; `step` of the environment is given them and must return them.

    Args:
        metrics: Of the environment's state.
        zeros: Value of every entry.
    """
    totals = {name: zeros for name in ("sum_reward", "length", *metrics)}
    return {"steps": zeros, "truncation": zeros, "episode_done": zeros, "episode_metrics": totals}


def without_first_state(state: Any) -> Any:
    """The environment's own state: everything but the cached first state."""
    return state.replace(info={name: value for name, value in state.info.items() if name not in _FIRST})


def pool_of(states: Any) -> PackedRows:
    """A pool of first states on the host, one row for each environment."""
    return PackedRows.of(_pool_parts(states))


def _pool_parts(state: Any) -> dict[str, Any]:
    """The cached first state, and what else an environment carries from step to step."""
    info = {name: value for name, value in state.info.items() if name not in (*_FIRST, *_EPISODE)}
    return {"first": {name: state.info[name] for name in _FIRST}, "info": info, "metrics": state.metrics}


def _in_passes(step: Callable[..., Any], args: tuple[Any, ...], per_pass: int) -> Any:
    """`jax.vmap(step)(*args)`, some rows after others; the last pass may have fewer.

    `jax.lax.map` with a batch size divides by zero where an array has no elements (jax 0.10), and MuJoCo's state has
    such arrays.
    """
    count = jax.tree.leaves(args)[0].shape[0]
    passes, rest = divmod(count, per_pass)
    whole = passes * per_pass
    batched = jax.tree.map(lambda x: x[:whole].reshape(passes, per_pass, *x.shape[1:]), args)
    _, results = jax.lax.scan(lambda carry, rows: (carry, jax.vmap(step)(*rows)), None, batched)
    results = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), results)
    if not rest:
        return results
    last = jax.vmap(step)(*jax.tree.map(lambda x: x[whole:], args))
    return jax.tree.map(lambda first, x: jax.lax.concatenate([first, x], 0), results, last)


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.dtype == jnp.uint32 and x.shape[-1:] == (2,))


def _truncate_bad(state: Any, ok: jax.Array) -> Any:
    """Turns the step of a bad environment into a truncation that is worth nothing."""
    info = dict(state.info)
    info["truncation"] = jnp.where(ok, info["truncation"], 1.0)
    if "time_out" in info:
        info["time_out"] = jnp.where(ok, info["time_out"], 0.0)
    return state.replace(reward=jnp.where(ok, state.reward, 0.0), done=jnp.where(ok, state.done, 1.0), info=info)


def _reset_finished(state: Any) -> Any:
    """Puts the first state where an episode is over, as Brax's AutoResetWrapper does."""
    over = state.done > 0
    first = {"pipeline_state" if hasattr(state, "pipeline_state") else "data": state.info["first_pipeline_state"]}
    current = {name: getattr(state, name) for name in first}
    return state.replace(**select(~over, current, first), obs=select(~over, state.obs, state.info["first_obs"]))


def _cast_like(new: Any, old: Any) -> Any:
    """`new` with the types and shapes of `old`: environments return Python floats, weak types and other widths."""

    def one(n: Any, o: Any) -> jax.Array:
        # Asked for by name, float64 would be narrowed here; what has it already keeps it.
        n = n if getattr(n, "dtype", None) == o.dtype else jnp.asarray(n, o.dtype)
        return jnp.broadcast_to(n, o.shape)

    return jax.tree.map(one, new, old)


class Episodes(NamedTuple):
    """One episode per environment.

    Attributes:
        metrics: Sums over the episode by name, `reward` among them, `[B]` each.
        length: Steps, `[B]`.
        aborted: 1.0 where the simulation went bad before the episode ended, `[B]`.
    """

    metrics: dict[str, jax.Array]
    length: jax.Array
    aborted: jax.Array


def run_episodes(env: VectorEnv, policy: Policy, keys: jax.Array, key: jax.Array) -> Episodes:
    """Plays one episode in every environment, to its end or to where it goes bad.

    Args:
        env: Its guards decide what is bad; without guards nothing is ever aborted.
        policy: Actions `[B, A]` from observations `[B, ...]` and a random key.
        keys: One random key per environment, for the resets.
        key: For the policy.
    """
    return watch_episodes(env, policy, keys, key, lambda state: None)[0]


def watch_episodes(
    env: VectorEnv, policy: Policy, keys: jax.Array, key: jax.Array, watch: Callable[[Any], Any]
) -> tuple[Episodes, Any]:
    """`run_episodes`, and what is to be seen of every state on the way.

    Args:
        env: As for `run_episodes`.
        policy: As for `run_episodes`.
        keys: As for `run_episodes`.
        key: As for `run_episodes`.
        watch: What is kept of a batched state.

    Returns:
        The episodes, and what was kept, `[1 + steps, B, ...]`: of the first states, and of those after every action,
        also where an episode was over before.
    """
    state = env.reset(keys)
    guard_state = {name: guard.init() for name, guard in env.guards.items()}
    zeros = jnp.zeros(keys.shape[:1])
    aborted = (~env.clean(state)).astype(jnp.float32)
    sums = {name: zeros for name in ("reward", *state.metrics)}

    def play(carry: Any, _: None) -> tuple[Any, Any]:
        state, active, episodes, key = carry
        key, next_key = jax.random.split(key)
        stepped, ok, _states, _slot = env._repeat_action(state, policy(state.obs, key), guard_state)
        going = active if ok is None else active & ok
        gained = {**stepped.metrics, "reward": stepped.reward}
        steps = stepped.info["steps"] + env.action_repeat
        stepped = stepped.replace(info={**stepped.info, "steps": steps})
        episodes = Episodes(
            {name: total + jnp.where(going, gained[name], 0.0) for name, total in episodes.metrics.items()},
            jnp.where(going, steps, episodes.length),
            episodes.aborted + (active & ~going),
        )
        going &= ~(stepped.done > 0)
        seen = watch(stepped)
        return (stepped.replace(done=jnp.zeros_like(stepped.done)), going, episodes, next_key), seen

    carry, first = (state, aborted == 0, Episodes(sums, zeros, aborted), key), watch(state)
    (_, _, episodes, _), seen = jax.lax.scan(play, carry, None, length=env.episode_length // env.action_repeat)
    return episodes, jax.tree.map(lambda one, others: jnp.concatenate([one[None], others]), first, seen)
