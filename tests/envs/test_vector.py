"""Vectorised environments: equal to the wrappers of Brax while healthy, and the quarantine of bad environments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import faulty
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax import envs
from brax.training import acting
from lowering import on_accelerator
from toys import finite, step_alone

from rlstable.config.guards import GuardsConfig
from rlstable.config.run import EnvConfig
from rlstable.envs.episodes import run_episodes
from rlstable.envs.load import load_env
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.guards.env import physics
from rlstable.ppo.guards import env_guards

pytestmark = pytest.mark.usefixtures("quick_compile")

STEPS, POOL, AT = 24, 6, 5
TOLERANCE = 1e-6  # between programs that compute the same; nothing was seen to differ by a bit
GUARDS = env_guards(GuardsConfig())
CAUSES = GUARDS["quarantine"].causes
CASES = [(site, value) for site in ("action", *faulty.SITES) for value in range(len(faulty.VALUES))]
BATCH = len(CASES) + 8
FAULTY = range(len(CASES))
HEALTHY = slice(len(CASES), BATCH)
OWN = ("steps", "truncation", "time_out", "episode_done", "episode_metrics")

MAKE: dict[str, Callable[[], Any]] = {
    "toy": faulty.Faulty,
    "named": lambda: faulty.Faulty(named=True),
    "data": lambda: faulty.Faulty(data=True),
    "every other": lambda: faulty.Faulty(period=2),
    "fast": lambda: envs.get_environment("fast"),
    "pendulum": lambda: envs.get_environment("inverted_pendulum", backend="spring"),
}
TOYS = ("toy", "named", "data", "every other")


class Setting(NamedTuple):
    """What a compiled unroll depends on; episodes last 8 actions, or until they end by themselves."""

    kind: str
    repeat: int = 1
    guarded: bool = True
    from_pool: bool = False

    @property
    def batch(self) -> int:
        return BATCH if self.kind in TOYS else 8

    @property
    def length(self) -> int:
        return 8 * self.repeat


environment = functools.cache(lambda kind: MAKE[kind]())


def vector(setting: Setting) -> VectorEnv:
    guards = GUARDS if setting.guarded else {}
    return VectorEnv(environment(setting.kind), setting.length, setting.repeat, guards, setting.from_pool)


@functools.cache
def fresh(kind: str) -> Any:
    """First states of every environment, and behind them those that the pool is made of."""
    setting = Setting(kind)
    keys = [first_keys(setting), jax.random.split(jax.random.PRNGKey(7), POOL)]
    return jax.tree.map(np.asarray, jax.jit(vector(setting).reset)(jnp.concatenate(keys)))


def first_states(kind: str) -> Any:
    return rows(fresh(kind), slice(0, Setting(kind).batch))


def pool(kind: str) -> Any:
    return rows(fresh(kind), slice(Setting(kind).batch, None))


def first_keys(setting: Setting) -> jax.Array:
    return jax.random.split(jax.random.PRNGKey(0), setting.batch)


@functools.cache
def compiled(setting: Setting) -> Any:
    env = vector(setting)

    def unroll(state: Any, actions: jax.Array, pool: Any) -> Any:
        def step(carry: Any, action: jax.Array) -> Any:
            state, guard_state, key = carry
            key, next_key = jax.random.split(key)
            result = step_alone(env, state, action, pool, key, guard_state)
            return (result.state, result.guard_state, next_key), result

        guard_state = {name: guard.init() for name, guard in env.guards.items()}
        return jax.lax.scan(step, (state, guard_state, jax.random.PRNGKey(3)), actions)[1]

    return jax.jit(unroll)


def play(setting: Setting, actions: Any, start: Any = None) -> Any:
    """Every step's result `[STEPS, B]`, on the host."""
    start = first_states(setting.kind) if start is None else start
    result = compiled(setting)(start, actions, pool_of(pool(setting.kind)) if vector(setting).uses_pool else None)
    return jax.tree.map(np.asarray, result)


class Repeated:
    """Repeats each action as rlstable does: the state stays after its end, and rewards and metrics are summed."""

    def __init__(self, env: Any, repeat: int):
        self.env, self.repeat = env, repeat

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, state: Any, action: jax.Array) -> Any:
        total = None
        for _ in range(self.repeat):
            after = self.env.step(state, action)
            sums = jax.tree.map(lambda x, run=state.done == 0: jnp.where(run, x, 0), (after.reward, after.metrics))
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
            state = jax.tree.map(lambda old, new, done=state.done: jnp.where(done > 0, old, new), state, after)
        return state.replace(reward=total[0], metrics=total[1])


def wrapped_by_brax(kind: str, length: int, repeat: int) -> Any:
    return envs.training.wrap(Repeated(environment(kind), repeat), length // repeat, 1)


@functools.cache
def brax_compiled(setting: Setting) -> Any:
    env = wrapped_by_brax(setting.kind, setting.length, setting.repeat)

    def unroll(actions: jax.Array) -> Any:
        def step(state: Any, action: jax.Array) -> Any:
            state = env.step(state, action)
            return state, state

        first = env.reset(first_keys(setting))
        return first, jax.lax.scan(step, first, actions)[1]

    return jax.jit(unroll)


@functools.cache
def healthy_actions(setting: Setting) -> np.ndarray:
    size = environment(setting.kind).action_size
    draw = jax.random.uniform(jax.random.PRNGKey(1), (STEPS, setting.batch, size), minval=-1.0, maxval=2.0)
    return np.asarray(draw.at[..., 1:].set(0.0))


def with_fault(actions: np.ndarray, step: int, index: int, site: str, value: int) -> None:
    if site == "action":
        actions[step, index, 0] = faulty.VALUES[value]
    else:
        actions[step, index, 1:] = 1 + faulty.SITES.index(site), value


def faulty_actions(setting: Setting) -> np.ndarray:
    """Environment `i` meets fault `i` in step AT; the last ones none."""
    actions = healthy_actions(setting).copy()
    for index, (site, value) in enumerate(CASES):
        with_fault(actions, AT, index, site, value)
    return actions


EXPECTED = ["physics" if site == "scratch" else site for site, _ in CASES]


def assert_same(expected: Any, got: Any, tolerance: float = 0.0) -> None:
    """Same leaves under the same names, same types, same bits; a tolerance where two programs are compared."""
    flat = jax.tree_util.tree_flatten_with_path
    ours = {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat(got)[0]}
    theirs = {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat(expected)[0]}
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert x.dtype == ours[name].dtype, name
        np.testing.assert_allclose(ours[name], x, rtol=tolerance, atol=tolerance, err_msg=name)


def rows(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def idents(state: Any) -> dict[str, np.ndarray]:
    """Which episode start each part of a state stems from."""
    obs = state.obs["state"] if isinstance(state.obs, dict) else state.obs
    first = state.info["first_state"].unpacked()
    first_obs = first["obs"]["state"] if isinstance(first["obs"], dict) else first["obs"]
    return {
        "physics": physics(state).ident,
        "observation": obs[..., 2],
        "info": state.info["ident"],
        "first physics": first["physics"].ident,
        "first observation": first_obs[..., 2],
    }


def assert_coherent(state: Any) -> None:
    expected = idents(state)["physics"]
    for name, found in idents(state).items():
        np.testing.assert_array_equal(found, expected, err_msg=name)


def assert_row_of_pool(state: Any, index: int, kind: str) -> None:
    """Physics, observation, cached first state, info and metrics of one environment are those of one row.

    Its random key alone stays its own: whoever draws the same row must not see the same noise.
    """
    one, drawn_from = rows(state, index), jax.tree.map(np.asarray, pool(kind))
    (row,) = np.flatnonzero(physics(drawn_from).ident == physics(one).ident)
    clean = rows(drawn_from, row)
    for got in (physics(one), one.info["first_state"].unpacked()["physics"]):
        assert_same(physics(clean), got)
    for got in (one.obs, one.info["first_state"].unpacked()["obs"]):
        assert_same(clean.obs, got)
    assert_same(clean.metrics, one.metrics)
    kept = (*OWN, "key")
    assert_same(
        {k: v for k, v in clean.info.items() if k not in kept}, {k: v for k, v in one.info.items() if k not in kept}
    )
    np.testing.assert_array_equal(one.info["key"], first_states(kind).info["key"][index])


def as_in_brax(state: Any) -> Any:
    """The state with the cached first state under the names that Brax gives it."""
    info = {**state.info, "episode_metrics": state.info["episode_metrics"].unpacked()}
    first = info.pop("first_state").unpacked()
    return state.replace(info={**info, "first_pipeline_state": first["physics"], "first_obs": first["obs"]})


def as_in_rlstable(state: Any, repeat: int) -> Any:
    """A state of Brax with steps that count action repeats, and the return as the metric called `reward`."""
    info = dict(state.info)
    totals = dict(info["episode_metrics"])
    totals["length"] = totals["length"] * repeat
    if "reward" in totals:
        totals["reward"] = totals["sum_reward"]
    return state.replace(info=info | {"steps": info["steps"] * repeat, "episode_metrics": totals})


# --- where all is well: Brax


CASES_OF_BRAX = [
    pytest.param(setting, id=str(setting), marks=pytest.mark.slow if setting.kind == "pendulum" else ())
    for setting in (
        Setting("toy", guarded=False), Setting("toy"), Setting("toy", 4), Setting("fast", 2), Setting("named", 2),
        Setting("pendulum", 2),
    )
]  # fmt: skip


@pytest.mark.parametrize("setting", CASES_OF_BRAX)
def test_healthy_steps_equal_those_of_brax(setting):
    """Observation, reward, done, metrics, physics and info over many episodes; no guard trips."""
    actions = healthy_actions(setting)
    first, theirs = brax_compiled(setting._replace(guarded=False))(actions)
    assert_same(first, as_in_brax(first_states(setting.kind)), TOLERANCE)
    result = play(setting, actions)
    assert_same(as_in_rlstable(theirs, setting.repeat), as_in_brax(result.state), TOLERANCE)
    if setting.guarded:
        assert result.valid.shape == (STEPS, setting.batch) and result.valid.all()
        assert not result.guard_state["quarantine"].trips.any()
    else:
        assert result.valid is None and result.guard_state == {}

    done, truncated = result.state.done, result.state.info["truncation"]
    assert (truncated > 0).sum() >= 2, "no episode came to its time limit"
    if setting.kind != "fast":
        assert ((done > 0) & (truncated == 0)).sum() > 5, "no episode ended by itself"


# --- one fault at a time


@pytest.mark.parametrize("setting", [Setting("every other", 2), Setting("named", 2), Setting("data")], ids=str)
def test_faulty_step_becomes_an_invalid_truncation_without_reward(setting):
    """Every site and every kind of bad number; with `every other` only the first of two repeats is bad."""
    result = play(setting, faulty_actions(setting))
    after = rows(result.state, AT)
    assert result.valid[:AT].all()
    for index in FAULTY:
        label = CASES[index]
        assert not result.valid[AT, index], label
        ends = after.done, after.info["truncation"], after.info["episode_done"]
        assert [end[index] for end in ends] == [1, 1, 1], label
        assert (after.reward[index], after.info["time_out"][index]) == (0, 0), label
        assert_row_of_pool(after, index, setting.kind)
    assert_coherent(after)
    assert len(set(physics(after).ident[FAULTY])) > 1, "all came from one row"


@pytest.mark.parametrize("setting", [Setting("toy"), Setting("every other", 2)], ids=str)
def test_environment_fault_is_counted_once_under_its_cause(setting):
    """Also if a repeat is bad for several reasons, or several repeats are bad."""
    trips = play(setting, faulty_actions(setting)).guard_state["quarantine"].trips
    assert not trips[AT - 1].any()
    counted = dict(zip(CAUSES, trips[AT].tolist(), strict=True))
    assert counted == {cause: EXPECTED.count(cause) for cause in CAUSES}
    np.testing.assert_array_equal(trips[AT:], np.broadcast_to(trips[AT], trips[AT:].shape))


def test_fault_does_not_change_the_other_environments():
    setting = Setting("every other", 2)
    faulted = play(setting, faulty_actions(setting)).state
    healthy = play(setting, healthy_actions(setting)).state
    spared = [*range(BATCH)[HEALTHY]]
    assert_same(rows(healthy, (slice(None), spared)), rows(faulted, (slice(None), spared)))


@pytest.mark.parametrize("guarded", [False, True], ids=["unguarded", "guarded"])
def test_pool_reset_draws_a_new_state_at_every_end_of_an_episode(guarded):
    """Physics, observation and info of one row; until then equal to a cached reset."""
    setting = Setting("toy", guarded=guarded, from_pool=True)
    state = play(setting, healthy_actions(setting)).state
    cached = play(Setting("toy", guarded=False), healthy_actions(setting)).state
    over = state.done > 0
    drawn = physics(jax.tree.map(np.asarray, pool("toy"))).ident
    assert over.sum() > 20
    assert np.isin(physics(state).ident[over], drawn).all()
    assert len(np.unique(physics(state).ident[over])) == POOL
    assert_coherent(state)
    assert (physics(state).t[over] == 0).all() and (state.info["calls"][over] == 0).all()
    for index, first_end in enumerate(over.argmax(axis=0)):
        before = slice(0, first_end), index
        assert_same(rows(state, before), rows(cached, before), TOLERANCE)


@pytest.mark.parametrize("from_pool", [False, True])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_noted_rows_of_an_iteration_give_the_states_of_rows_cached_at_once(platform, from_pool):
    """Also where an environment that went bad finishes again, from the row of the pool that it noted."""
    setting = Setting("toy", from_pool=from_pool)
    env, actions, start = vector(setting), faulty_actions(setting), first_states(setting.kind)
    guards = {name: guard.init() for name, guard in env.guards.items()}

    @jax.jit
    def iteration(state: Any, actions: jax.Array, pool: Any) -> Any:
        def step(carry: Any, action: jax.Array) -> Any:
            state, key = carry
            key, next_key = jax.random.split(key)
            state = env.step(state, action, pool, key, guards).state
            return (state, next_key), (state.obs, physics(state), state.metrics)

        (state, _), seen = jax.lax.scan(step, (env.begin(state, pool), jax.random.PRNGKey(3)), actions)
        return env.end(state, pool), seen

    expected = play(setting, actions).state
    with on_accelerator(platform):
        last, seen = iteration(start, actions, pool_of(pool(setting.kind)))
    assert_same((expected.obs, physics(expected), expected.metrics), seen)
    assert_same(rows(expected, -1), last)


# --- evaluation


@pytest.mark.parametrize(("kind", "repeat"), [("toy", 2), ("fast", 1)])
def test_evaluation_episodes_equal_those_of_the_brax_evaluator(kind, repeat):
    """With and without a guard."""
    count, length = 16, 8 * repeat
    env = environment(kind)

    def policy(obs: jax.Array, key: jax.Array) -> jax.Array:
        push = 2.0 * jnp.tanh(obs[:, :1] + jax.random.normal(key, (count, 1)))
        return jnp.concatenate([push, jnp.zeros((count, env.action_size - 1))], axis=1)

    wrapped, acts = wrapped_by_brax(kind, length, repeat), lambda obs, key: (policy(obs, key), {})
    evaluator = acting.Evaluator(wrapped, lambda _: acts, count, length // repeat, 1, jax.random.PRNGKey(11))
    reported = evaluator.run_evaluation(None, {})
    theirs = evaluator._eval_state_to_donate.info["eval_metrics"]
    _, key = jax.random.split(jax.random.PRNGKey(11))
    for guards in ({}, GUARDS):
        vector = VectorEnv(env, length, repeat, guards)
        ours = jax.jit(lambda key, vector=vector: run_episodes(vector, policy, jax.random.split(key, count), key))(key)
        assert set(ours.metrics) == set(theirs.episode_metrics)
        for name, sums in theirs.episode_metrics.items():
            np.testing.assert_allclose(ours.metrics[name], sums, rtol=1e-6, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(np.mean(ours.metrics[name]), reported[f"eval/episode_{name}"], rtol=1e-6)
        np.testing.assert_array_equal(ours.length, theirs.episode_steps * repeat)
        assert not ours.aborted.any()
        if kind != "fast":
            assert len(np.unique(ours.length)) > 2, "all episodes ended together"


def run_faulty(guards: dict[str, Any]) -> tuple[Any, np.ndarray]:
    """Half of the environments go bad in their fourth step."""
    env = faulty.Faulty(period=100, phase=3)
    vector = VectorEnv(env, 8, 1, guards)

    def policy(obs: jax.Array, key: jax.Array) -> jax.Array:
        site = jnp.where(obs[:, 2] > 0, 1.0 + faulty.SITES.index("reward"), 0.0)
        return jnp.stack([jnp.zeros_like(site), site, jnp.zeros_like(site)], axis=1)

    keys = jax.random.split(jax.random.PRNGKey(0), 16)
    episodes = jax.jit(lambda: run_episodes(vector, policy, keys, jax.random.PRNGKey(1)))()
    return jax.tree.map(np.asarray, episodes), np.asarray(jax.vmap(faulty.Faulty().reset)(keys).obs[:, 2] > 0)


def test_evaluation_episode_is_aborted_at_its_first_bad_step():
    """Its sums up to there are finite, and other episodes do not change."""
    episodes, bad = run_faulty(GUARDS)
    assert 0 < bad.sum() < 16
    np.testing.assert_array_equal(episodes.aborted, bad)
    np.testing.assert_array_equal(episodes.length, np.where(bad, 3, 8))
    assert finite(episodes)
    unguarded, _ = run_faulty({})
    assert not unguarded.aborted.any()
    assert np.isnan(unguarded.metrics["reward"][bad]).all()
    for name, sums in episodes.metrics.items():
        np.testing.assert_allclose(sums[~bad], unguarded.metrics[name][~bad], rtol=1e-6)


def test_environments_in_passes_may_have_arrays_without_elements() -> None:
    """Passes over environments of MuJoCo ended in a ZeroDivisionError."""
    env = load_env(EnvConfig(name="inverted_pendulum", backend="native"))
    whole = VectorEnv(env, 8, 1, {})
    state = jax.jit(whole.reset)(jax.random.split(jax.random.PRNGKey(0), 16))
    action = jnp.full((16, env.action_size), 0.5)
    assert any(x.size == 0 for x in jax.tree.leaves(state))

    def stepped(vector: VectorEnv) -> Any:
        step = jax.jit(lambda state, action: vector.step(state, action, None, jax.random.PRNGKey(1), {}).state)
        return step(state, action)

    expected, found = stepped(whole), stepped(dataclasses.replace(whole, per_pass=7))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE), found, expected)
