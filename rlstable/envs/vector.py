"""Vectorised environments: vmap, action repeat, automatic reset, quarantine.

On healthy environments every step equals a step of Brax's wrappers (VmapWrapper, EpisodeWrapper, AutoResetWrapper,
EvalWrapper), which are the reference in the tests. Three things differ (docs/coming_from.md):

- The environment's own `truncation` counts. `EpisodeWrapper` overwrites `truncation`.
- An episode that ends within an action repeat stays ended, and metrics are summed over the repeats.
- A bad environment gets a clean state. `AutoResetWrapper` uses the cached first state, which may be bad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from rlstable.device.packed import PackedRows
from rlstable.device.shared import Shared, shared_in, vmapped, with_shared_of, without_shared
from rlstable.device.transforms import on_accelerator, select_if
from rlstable.device.trees import PRESERVED, Env, EnvState, PyTree
from rlstable.envs import capture
from rlstable.envs.shared_leaves import contact_norms, mark
from rlstable.guards.base import Guard, GuardState, all_finite, both, fold, select
from rlstable.guards.env import EnvContext, physics, physics_field, without_fields
from rlstable.ppo.rollout import Step
from rlstable.ppo.state import Slot

# Entries of `info` that environments do not see: the cached first state and the sums over the episode. They are packed,
# because every array of the training state costs operations in every step.
FIRST_STATE, TOTALS = "first_state", "episode_metrics"
_EPISODE = ("steps", "truncation", "time_out", "episode_done", TOTALS)
_DONE_COUNT = "AutoResetWrapper_done_count"  # in which Playground's BraxAutoResetWrapper counts episodes
GuardStates = dict[str, GuardState]  # by name
MODEL = "model"  # entry of `info` with the randomised parameters of an environment, which it keeps
_NEVER_RESET = (FIRST_STATE, MODEL, _DONE_COUNT, *_EPISODE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NotedRows:
    """The entry `FIRST_STATE` during an iteration: the cached first states, and rows of the pool to replace them by.

    An accelerator replaces them at the end of the iteration: at once it would copy all first states in every step.
    """

    cached: PackedRows
    rows: jax.Array  # int32 `[B]`, -1 for the cached first state


@dataclasses.dataclass(frozen=True)
class VectorEnv:
    """Many copies of an environment, stepped together.

    An environment restarts from the same first state, cached at its reset, or from states of the pool. Without guards
    the traced program contains no checks.
    """

    env: Env
    episode_length: int  # steps after which an episode is cut, action repeat included
    action_repeat: int  # environment steps per action
    guards: Mapping[str, Guard]  # of the env site, by name
    reset_from_pool: bool = False  # whether each new episode draws its first state from the pool
    per_pass: int | None = None  # number of environments to step at once; None for all
    restore_info: bool = False  # whether a reset restores `info` and additional fields of the state, too

    @property
    def uses_pool(self) -> bool:
        return self.reset_from_pool or bool(self.guards)

    def reset(self, keys: jax.Array) -> EnvState:
        """First states, `[B]` for `B` random keys, with first state and episode in `info`; shared leaves marked."""
        state = mark(jax.vmap(self.env.reset)(keys), self.env.reset, keys)
        zeros = jnp.zeros(keys.shape[:1])
        cached = {"physics": physics(state), "obs": state.obs} | ({"rest": _rest(state)} if self.restore_info else {})
        ours = {
            FIRST_STATE: PackedRows.of(without_shared(cached)),
            TOTALS: PackedRows.of(dict.fromkeys(("sum_reward", "length", *state.metrics), zeros)),
        }
        return state.replace(info={**state.info, **episode_entries(zeros), **ours})

    def clean(self, state: EnvState) -> jax.Array:
        """Whether the env guards accept a first state, bool `[B]`."""
        alive = jnp.ones(state.reward.shape, bool)
        guard_state = {name: guard.init() for name, guard in self.guards.items()}
        context = EnvContext(state, jnp.zeros((*alive.shape, 1)), alive, contact_norms(state))
        return alive & fold(self.guards, context, guard_state).ok

    def empty_slot(self, state: EnvState, action_size: int, devices: int) -> Slot:
        """Empty slots for the first bad environment of every device, on the host, from the shapes of a state."""
        return capture.empty(self.guards, as_environments_see(state), action_size, devices)

    def step(
        self,
        state: EnvState,
        action: jax.Array,
        pool: PackedRows | None,
        key: jax.Array,
        guard_state: GuardStates,
        incident: Slot | None = None,
    ) -> Step:
        """Takes one action in every environment, `action_repeat` times, and resets finished and bad environments.

        The episode of a bad environment ends as a truncation with reward 0 and without a time-out bootstrap. All parts
        of its next state come from the pool (`pool_of`), at the iteration's end the cached first state, too. With a
        pool the first state of an iteration is that of `begin`.
        """
        before = state.info
        state, ok, guard_state, incident = self.repeat_action(state, action, guard_state, incident, key)
        state = state.replace(info={**state.info, **self._episode(before, state, ok)})
        state = state.replace(done=jnp.where(state.info["steps"] >= self.episode_length, 1.0, state.done))
        if ok is not True:
            state = _truncate_bad(state, ok, before)
        info = {**state.info, "episode_done": state.done}
        if _DONE_COUNT in info:
            info[_DONE_COUNT] += state.done.astype(info[_DONE_COUNT].dtype)
        state = self._reset_ended(state.replace(info=info), ok, pool, key)
        return Step(state, None if isinstance(ok, bool) else ok, guard_state, incident)

    def repeat_action(
        self,
        state: EnvState,
        action: jax.Array,
        guard_state: GuardStates,
        incident: Slot | None = None,
        key: PyTree = None,
    ) -> tuple[EnvState, jax.Array | bool, GuardStates, Slot | None]:
        """Steps every environment with the action, `action_repeat` times, without a reset.

        An environment that went bad stays bad, even if a later repeat looks healthy. An environment whose episode ends
        keeps its state in later repeats. Rewards and metrics are summed over the repeats. The second result says which
        environments are not bad, `[B]`; a Python `True` without guards.
        """
        ours, start = {name: state.info[name] for name in (FIRST_STATE, TOTALS)}, _start(state)
        alive = jnp.ones(start.done.shape, bool)

        def repeat(carry: PyTree, _: None) -> tuple[PyTree, PyTree]:
            state, alive, guard_state, incident = carry
            stepped, contacts = self._step(state, action)
            stepped = _cast_like(stepped, state)
            added, plays = (stepped.reward, stepped.metrics), alive
            if self.action_repeat > 1:
                runs = ~(state.done > 0)
                plays = alive & runs
                stepped = with_shared_of(select(runs, without_shared(stepped), without_shared(state)), stepped)
                contacts, added = select(runs, (contacts, added), jax.tree.map(jnp.zeros_like, (contacts, added)))
            context = EnvContext(stepped, action, plays, contacts)
            _, ok, new_guard_state = fold(self.guards, context, guard_state)
            if incident is not None:
                causes = capture.flags(self.guards, context, guard_state, new_guard_state)
                incident = capture.catch(incident, action, stepped, causes, key, plays & ~ok)
                if self.action_repeat > 1:
                    incident = dataclasses.replace(incident, before=capture.packed(stepped))
            return (stepped, both(ok, alive), new_guard_state, incident), added

        carry = (start, alive, guard_state, incident)
        if self.action_repeat == 1:
            (state, alive, guard_state, incident), (reward, metrics) = repeat(carry, None)
        else:
            (state, alive, guard_state, incident), each = jax.lax.scan(repeat, carry, None, length=self.action_repeat)
            reward, metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), each)
        info = {**state.info, "steps": start.info["steps"], **ours}
        state = state.replace(reward=reward, metrics=metrics, info=info)
        return state, (alive if self.guards else True), guard_state, incident

    def _step(self, state: EnvState, action: jax.Array) -> tuple[EnvState, jax.Array | None]:
        """Steps every environment once, in one or more passes; returns the states and their `contact_norms`."""
        if self.per_pass is None or self.per_pass >= action.shape[0]:
            stepped = vmapped(self.env.step, state, action)
            return stepped, contact_norms(stepped)
        return _in_passes(self.env.step, state, action, self.per_pass)

    def _episode(self, before: dict[str, PyTree], state: EnvState, ok: jax.Array | bool) -> dict[str, PyTree]:
        """Step count, truncation and sums of the episode. Names of training win over the environment's metrics."""
        steps = state.info["steps"] + self.action_repeat
        truncation = jnp.where(state.done > 0, state.info["truncation"] > 0, steps >= self.episode_length)
        new_episode = before["episode_done"] > 0
        added = {**state.metrics, "sum_reward": state.reward, "length": jnp.full_like(steps, self.action_repeat)}
        if "reward" in state.metrics:
            added["reward"] = state.reward
        totals = before[TOTALS]
        values = PackedRows.of({name: value.astype(steps.dtype) for name, value in added.items()})
        none = jax.tree.map(jnp.zeros_like, values)
        totals = jax.tree.map(jnp.add, select(new_episode, none, totals), select(ok, values, none))
        return {"steps": steps, "truncation": truncation.astype(steps.dtype), TOTALS: totals}

    def begin(self, state: EnvState, pool: PackedRows | None) -> EnvState:
        """The states before the steps of an iteration: environments can note the row of the pool that they get."""
        if pool is None:
            return state
        rows = jnp.full(state.done.shape, -1, jnp.int32)
        return state.replace(info={**state.info, FIRST_STATE: NotedRows(state.info[FIRST_STATE], rows)})

    def packed(self, state: EnvState) -> PackedRows:
        """The parts of the states before their next step that an incident records."""
        return capture.packed(_start(state))

    def end(self, state: EnvState, pool: PackedRows | None) -> EnvState:
        """The states after the steps of an iteration: noted rows of the pool replace the cached first states."""
        if pool is None:
            return state
        cached, rows = state.info[FIRST_STATE].cached, state.info[FIRST_STATE].rows

        def renew(cached: PackedRows) -> PackedRows:
            return select(rows < 0, cached, pool.take(jnp.maximum(rows, 0))["first"])

        return state.replace(info={**state.info, FIRST_STATE: select_if(jnp.any(rows >= 0), renew, cached)})

    def _reset_ended(self, state: EnvState, ok: jax.Array | bool, pool: PackedRows | None, key: jax.Array) -> EnvState:
        """Gives ended environments their cached first state or, if they have gone bad, one from the pool.

        With `reset_from_pool` all come from the pool. The metrics of bad ones come from the pool, too; those of the
        others are not reported yet. On a CPU `select_if` skips needless draws.
        """
        if pool is None:
            return _reset_finished(state)
        done, noted = state.done > 0, state.info[FIRST_STATE]
        bad = jnp.zeros(done.shape, bool) if isinstance(ok, bool) else ~ok
        draws = done if self.reset_from_pool else bad
        from_pool = done & (draws | (noted.rows >= 0))

        def draw(parts: dict[str, PyTree]) -> dict[str, PyTree]:
            rows = jax.random.randint(jax.random.fold_in(key, 1), done.shape, 0, len(pool))
            rows = jnp.where(draws, rows, parts["rows"])
            drawn = pool.take(jnp.where(from_pool, rows, 0))  # the others all read row 0, so a GPU moves less memory
            info = _with_kept(drawn["info"], parts["info"])
            return {
                "first": select(~from_pool, parts["first"], drawn["first"]),
                "info": select(~draws, parts["info"], info),
                "metrics": select(~bad, parts["metrics"], drawn["metrics"]),
                "rows": rows,
            }

        before = {"first": noted.cached, "info": _rest(state), "metrics": state.metrics, "rows": noted.rows}
        parts = with_shared_of(select_if(jnp.any(from_pool), draw, without_shared(before)), before)
        state = _with_rest(state.replace(metrics=parts["metrics"]), parts["info"])
        state = _reset_finished(state.replace(info={**state.info, FIRST_STATE: parts["first"]}))
        # A CPU has replaced the rows in place. On an accelerator that would copy all of them, and `end` does it once.
        cached = noted.cached if on_accelerator() else parts["first"]
        return state.replace(info={**state.info, FIRST_STATE: NotedRows(cached, parts["rows"])})


def episode_entries(zeros: PyTree) -> dict[str, PyTree]:
    """The entries of `info` that describe the episode, all `zeros`; the environment's `step` must return them."""
    return {"steps": zeros, "truncation": zeros, "episode_done": zeros}


def as_environments_see(state: EnvState) -> EnvState:
    """The state without the entries of `info` that the environments' own code does not know."""
    return state.replace(info={name: value for name, value in state.info.items() if name not in (FIRST_STATE, TOTALS)})


def pool_of(states: EnvState) -> PackedRows:
    """A pool of first states on the host, one row per environment, without shared leaves."""
    parts = {"first": states.info[FIRST_STATE], "info": _rest(states), "metrics": states.metrics}
    return PackedRows.of(without_shared(parts))


def _rest(state: EnvState) -> EnvState:
    """The environment's own `info` entries, and the fields that the class of the state adds; other fields are None."""
    info = {name: value for name, value in state.info.items() if name not in _NEVER_RESET}
    return without_fields(state, physics_field(state), "obs", "reward", "done", "metrics").replace(info=info)


def _with_rest(state: EnvState, rest: EnvState) -> EnvState:
    """The state with the leaves of another `_rest`."""
    fields = {name: getattr(state, name) for name in (physics_field(state), "obs", "reward", "done", "metrics")}
    return rest.replace(**fields, info={**state.info, **rest.info})


def _with_kept(new: EnvState, old: EnvState) -> EnvState:
    """A `_rest` of first states with the random keys, and the finite values to preserve, that environments have now.

    With the random keys of one first state, two environments would get the same noise.
    """
    new = jax.tree.map(lambda new, old: old if _is_key(old) else new, new, old)
    if PRESERVED not in old.info:
        return new
    own, first = old.info[PRESERVED], new.info[PRESERVED]
    return new.replace(info={**new.info, PRESERVED: select(all_finite(own, 1), own, first)})


def _in_passes(
    step: Callable[[EnvState, jax.Array], EnvState], state: EnvState, action: jax.Array, per_pass: int
) -> tuple[EnvState, jax.Array | None]:
    """Steps `per_pass` environments at a time, the last pass maybe fewer; returns states and `contact_norms`.

    Shared leaves go from pass to pass, each of which overwrites the contacts of the pass before. `jax.lax.map` with a
    batch size divides by zero for arrays without elements (JAX 0.10), which MuJoCo's state has.
    """
    count = action.shape[0]
    passes, rest = divmod(count, per_pass)
    whole = passes * per_pass

    def one_pass(shared: list[Shared], rows: tuple[EnvState, jax.Array]) -> tuple[list[Shared], PyTree]:
        stepped = vmapped(step, with_shared_of(rows[0], state, shared), rows[1])
        return _cast_like(shared_in(stepped), shared), (without_shared(stepped), contact_norms(stepped))

    args = (without_shared(state), action)
    batched = jax.tree.map(lambda x: x[:whole].reshape(passes, per_pass, *x.shape[1:]), args)
    shared, results = jax.lax.scan(one_pass, shared_in(state), batched)
    results = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), results)
    if rest:
        shared, last = one_pass(shared, jax.tree.map(lambda x: x[whole:], args))
        results = jax.tree.map(lambda first, x: jax.lax.concatenate([first, x], 0), results, last)
    own, contacts = results
    return with_shared_of(own, state, shared), contacts


def _is_key(x: jax.Array) -> bool:
    """Whether a leaf holds random keys: typed ones, or integers with the shape of JAX's default implementation."""
    if x.dtype != jnp.uint32:
        return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    raw = jax.eval_shape(lambda: jax.random.PRNGKey(0))  # a new function, because JAX may change its default
    return x.shape[-1:] == raw.shape


def _start(state: EnvState) -> EnvState:
    """The argument of the environments' next step."""
    start, done = as_environments_see(state), state.done
    steps = jnp.where(done > 0, 0.0, start.info["steps"])
    # The environment may write its own truncation.
    info = {**start.info, "steps": steps, "truncation": jnp.zeros_like(done)}
    return start.replace(done=jnp.zeros_like(done), info=info)


def _truncate_bad(state: EnvState, ok: jax.Array | bool, before: dict[str, PyTree]) -> EnvState:
    """Turns the step of a bad environment into a truncation with reward 0; values to preserve are those `before` it."""
    info = {**state.info, "truncation": jnp.where(ok, state.info["truncation"], 1.0)}
    if "time_out" in info:
        info["time_out"] = jnp.where(ok, info["time_out"], 0.0)
    if PRESERVED in info:
        info[PRESERVED] = select(ok, info[PRESERVED], before[PRESERVED])
    return state.replace(reward=jnp.where(ok, state.reward, 0.0), done=jnp.where(ok, state.done, 1.0), info=info)


def _reset_finished(state: EnvState) -> EnvState:
    """Replaces the state of finished environments by the cached first state, as Brax's AutoResetWrapper does."""
    done, first, current = state.done > 0, state.info[FIRST_STATE].unpacked(), physics(state)
    physics_state = with_shared_of(select(~done, without_shared(current), first["physics"]), current)
    if "rest" in first:
        rest = _rest(state)
        own = without_shared(rest)
        state = _with_rest(state, with_shared_of(select(~done, own, _with_kept(first["rest"], own)), rest))
    return state.replace(**{physics_field(state): physics_state}, obs=select(~done, state.obs, first["obs"]))


def _cast_like(new: PyTree, old: PyTree) -> PyTree:
    """`new` with the types and shapes of `old`: environments may return Python floats, weak types or other widths."""

    def cast(n: jax.typing.ArrayLike, o: jax.Array) -> jax.Array:
        # Without x64 `jnp.asarray` would narrow float64, so arrays that already have the type stay as they are.
        n = n if getattr(n, "dtype", None) == o.dtype else jnp.asarray(n, o.dtype)
        return jnp.broadcast_to(n, o.shape)

    return jax.tree.map(cast, new, old)
