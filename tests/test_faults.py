"""Injected faults: one compiled program runs them all, and each trips only its own guard."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from toys import GUARDS_OFF, Physics, PointMass, State, assemble, compiled, finite, learnt, placed, tiny_config

from rlstable import faults
from rlstable.config import Config, ConfigError
from rlstable.config.faults import FaultConfig
from rlstable.envs.resets import Resets
from rlstable.envs.vector import VectorEnv
from rlstable.faults import SITES
from rlstable.ppo.guards import env_guards
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import Metrics, TrainState
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
NEVER = 1_000  # an iteration that no test reaches
STEPS, MINIBATCHES = 64, 4  # environment steps and updates of an iteration of the miniature
START, LENGTH, TOTAL = 1, 2, 5
ON_HOST = ("disk", "sinks")


@struct.dataclass
class Solved(Physics):
    """Physics whose solver starts from MuJoCo's warm start."""

    qacc_warmstart: jax.Array


class Solver(PointMass):
    """A point moved by a solver: a warm start of NaN makes the next step NaN."""

    def reset(self, rng: jax.Array) -> State:
        return self._solved(super().reset(rng), jnp.zeros(2))

    def step(self, state: State, action: jax.Array) -> State:
        return self._solved(super().step(state, action + 0.0 * state.pipeline_state.qacc_warmstart), action)

    @staticmethod
    def _solved(state: State, warm_start: jax.Array) -> State:
        return state.replace(pipeline_state=Solved(**vars(state.pipeline_state) | {"qacc_warmstart": warm_start}))


History = list[tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that was compiled ahead, so that calling it cannot compile another, and its first state."""

    ppo: PPO
    state: TrainState
    call: Callable[[TrainState], tuple[TrainState, Metrics]]

    def run(self, fault: FaultConfig, iterations: int = TOTAL) -> History:
        """State and metrics after each iteration with a fault."""
        state = placed(dataclasses.replace(self.state, fault=faults.as_data(fault)))
        return self.run_from(state, iterations)

    def run_from(self, state: TrainState, iterations: int) -> History:
        history = []
        for _ in range(iterations):
            state, metrics = self.call(state)
            history.append((state, metrics))
        return history

    def trips(self, metrics: Metrics) -> dict[str, int]:
        ppo = self.ppo
        guards = {**ppo.env.guards, **ppo.batch_guards, **ppo.update_guards, **ppo.state_guards}
        return {
            f"{name}.{cause}": int(count)
            for name, guard in guards.items()
            for cause, count in zip(guard.causes, metrics.trips[name], strict=True)
            if count
        }


def armed(config: Config, env: Any) -> tuple[PPO, TrainState]:
    """PPO and its first state with a fault, as `TrainingLoop` assembles them."""
    ppo, state = assemble(config, env, faulty=True)
    ppo = faults.arm(ppo, config.precision.matmul, config.fault)
    return ppo, faults.armed_state(state, config.fault)


def program(guards: dict[str, Any]) -> Program:
    ppo, state = armed(tiny_config(guards=guards, fault={"site": "warm_start", "start": NEVER}), Solver())
    state = placed(state)
    return Program(ppo, state, compiled(ppo).lower(state).compile())


@pytest.fixture(scope="module")
def guarded() -> Program:
    return program({})


@pytest.fixture(scope="module")
def unguarded() -> Program:
    return program(GUARDS_OFF)


@pytest.fixture(scope="module")
def clean(guarded: Program) -> History:
    return guarded.run(FaultConfig(site="physics", start=NEVER))


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def window(site: str, **changes: Any) -> FaultConfig:
    chance = {} if site in ALWAYS else {"probability": 0.9 if site in PER_MINIBATCH else 0.2}
    return FaultConfig(site=site, start=START, iterations=LENGTH, **chance | changes)


def active(metrics: Metrics) -> set[str]:
    """Names of the active limiters. NaN (no update was accepted) is not active."""
    return {name.split("/")[1] for name in metrics.values if name.startswith("limiters/") and metrics.values[name] > 0}


ALWAYS = ("learning_rate", "counters", "critic", "normalizer")  # sites whose faults have no probability
PER_MINIBATCH = ("gradient", "loss", "value_loss", "kl", "adam")
# For each site: the guards that trip during the fault, as `guard.cause`, and the limiters that become active.
EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    "physics": ({"quarantine.physics"}, set()),
    "warm_start": ({"quarantine.physics"}, set()),
    "observation": ({"quarantine.observation"}, set()),
    "reward": ({"quarantine.reward"}, set()),
    "done": ({"quarantine.done"}, set()),
    "metrics": ({"quarantine.metrics"}, set()),
    "info": ({"quarantine.info"}, set()),
    "reset": (set(), set()),  # only resets see it
    "action": ({"quarantine.physics"}, set()),  # the policy's action is good, the simulated one is not
    "policy_std": ({"finite_samples.policy"}, set()),
    # At the bound of 20 the restoring gradient is e^20 times as large, so the update is rejected.
    "log_ratio": (set(), {"log_ratio"}),
    "gradient": ({"finite_update.gradient"}, set()),
    "loss": ({"finite_update.gradient"}, set()),
    "value_loss": ({"spike.spike"}, set()),
    "kl": (set(), {"kl"}),
    "adam": ({"finite_update.parameters"}, set()),
    "learning_rate": (set(), {"kl", "update_norm"}),
    "counters": (set(), set()),  # the counters are set before the first iteration
}


COLLAPSES = ("critic", "normalizer")  # finite faults whose effect outlasts the iteration, tested below


def test_every_fault_site_of_a_program_has_a_row_in_the_table() -> None:
    assert set(EXPECTED) | set(COLLAPSES) == set(SITES) - set(ON_HOST)


@pytest.mark.parametrize("site", EXPECTED)
def test_fault_trips_its_guard_during_its_iterations_only(site: str, guarded: Program, clean: History) -> None:
    history = guarded.run(window(site))
    trips = [guarded.trips(metrics) for _, metrics in history]
    limited = [active(metrics) for _, metrics in history]
    guards, limiters = EXPECTED[site]
    assert {name for counts in trips[START : START + LENGTH] for name in counts} == guards
    assert set().union(*limited[START : START + LENGTH]) == limiters
    assert all(trips[START : START + LENGTH]) == bool(guards)
    assert not any(trips[:START] + trips[START + LENGTH :] + limited[:START] + limited[START + LENGTH :])
    for state, _ in history:
        assert finite(learnt(state))
    assert all(bool(metrics.healthy) for _, metrics in history)
    assert [float(metrics.values["training/accepted_share"]) for _, metrics in history[START + LENGTH :]] == [1.0] * 2
    before, after = clean[START - 1][0], clean[START][0]
    assert same(learnt(before), learnt(history[START - 1][0]))
    assert same(learnt(after), learnt(history[START][0])) == (not guards | limiters)


@pytest.mark.parametrize("site", ["physics", "policy_std", "gradient", "learning_rate", "critic", "normalizer"])
def test_iterations_after_a_fault_equal_those_of_a_run_without_fault(site: str, guarded: Program) -> None:
    """From the same state, bit for bit."""
    state = guarded.run(window(site), START + LENGTH)[-1][0]
    healthy = placed(dataclasses.replace(state, fault=faults.as_data(FaultConfig(site="physics", start=NEVER))))
    faulty, free = guarded.run_from(state, 2)[-1][0], guarded.run_from(healthy, 2)[-1][0]
    assert same(dataclasses.replace(faulty, fault=None), dataclasses.replace(free, fault=None))


DEADLY = (
    "physics", "warm_start", "observation", "reward", "done", "action", "policy_std", "log_ratio", "gradient", "loss",
    "adam",
)  # fmt: skip
HARMLESS = ("metrics", "info", "reset", "kl", "counters", "learning_rate", "value_loss", "critic", "normalizer")


@pytest.mark.parametrize("site", DEADLY)
def test_deadly_fault_without_guards_makes_parameters_non_finite(site: str, unguarded: Program) -> None:
    """NaN in a warm start reaches the observation one step later."""
    history = unguarded.run(window(site))
    assert finite(learnt(history[START - 1][0]))
    assert not finite(history[-1][0].params)
    assert not finite(history[-1][0].opt_state)


def test_other_faults_without_guards_leave_parameters_finite(unguarded: Program) -> None:
    assert set(DEADLY) | set(HARMLESS) == set(EXPECTED) | set(COLLAPSES)
    for site in HARMLESS:
        assert finite(learnt(unguarded.run(window(site))[-1][0])), site


def test_training_continues_after_iterations_without_a_valid_sample(guarded: Program) -> None:
    history = guarded.run(FaultConfig(site="physics", probability=1.0, start=START, iterations=LENGTH))
    storm = slice(START, START + LENGTH)
    accepted = [float(metrics.values["training/accepted_share"]) for _, metrics in history]
    assert accepted == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert [bool(metrics.healthy) for _, metrics in history] == [True, False, False, True, True]
    for state, metrics in history[storm]:
        assert guarded.trips(metrics) == {"quarantine.physics": STEPS, "storm.environments": 1}
        assert same(learnt(state), learnt(history[START - 1][0]))
        assert finite(state.env_state)
    assert finite(learnt(history[-1][0]))
    assert not same(history[-1][0].params, history[START - 1][0].params)


@pytest.mark.parametrize(("value", "limit"), [(None, 2**31), (2.0**32, 2**32)])
def test_counters_fault_starts_counters_just_below_a_limit(value: float | None, limit: int, guarded: Program) -> None:
    state = faults.armed_state(guarded.state, FaultConfig(site="counters", value=value))
    counters = (state.counters.env_steps, state.counters.updates, state.counters.episodes, state.normalizer.count)
    assert [int(counter) for counter in counters] == [limit - 1] * 4
    history = guarded.run_from(placed(state), TOTAL)
    steps = [limit - 1 + STEPS * (i + 1) for i in range(TOTAL)]
    assert [int(state.normalizer.count) for state, _ in history] == steps
    assert [int(state.counters.env_steps) for state, _ in history] == steps
    assert [int(state.counters.updates) for state, _ in history] == [
        limit - 1 + MINIBATCHES * (i + 1) for i in range(TOTAL)
    ]
    assert [float(metrics.values["training/accepted_share"]) for _, metrics in history] == [1.0] * TOTAL
    assert not any(active(metrics) for _, metrics in history)
    assert all(finite(learnt(state)) for state, _ in history)


def test_guards_reject_bad_resets() -> None:
    def draw(guards: dict[str, Any]) -> tuple[Any, np.ndarray]:
        config = tiny_config(guards=guards, fault={"site": "reset", "probability": 0.5})
        vector = VectorEnv(PointMass(), 12, 1, env_guards(config.guards))
        resets = Resets(faults.faulty_env(vector, config.fault), 16)
        return resets.draw(jax.random.PRNGKey(0), 64), np.asarray(resets.program(jax.random.PRNGKey(0))[1])

    states, good = draw({})
    assert finite(states)
    assert 0 < good.sum() < good.size
    states, _ = draw(GUARDS_OFF)
    bad = ~np.isfinite(states.obs[:, 0])
    assert 16 < bad.sum() < 48
    assert (np.isnan(states.pipeline_state.q[:, 0]) == bad).all()


# --- collapses: finite faults of the training state ----------------------------------------------------------


def collapse(site: str, **changes: Any) -> FaultConfig:
    return FaultConfig(site=site, start=START, iterations=1, **changes)


@pytest.mark.parametrize("value", [None, 7.0])
def test_critic_fault_replaces_value_parameters_by_noise_of_their_size(value: float | None, guarded: Program) -> None:
    """At a learning rate of 0, so that only the fault changes the parameters."""
    tuning = dataclasses.replace(guarded.state.tuning, learning_rate=jnp.zeros(()))
    idle = dataclasses.replace(guarded, state=placed(dataclasses.replace(guarded.state, tuning=tuning)))
    history = idle.run(collapse("critic", value=value))
    params = [jax.tree.map(lambda x: x + 0.0, jax.device_get(state.params)) for state, _ in history]  # -0.0 is 0.0
    assert same(params[START - 1]["value"], idle.state.params["value"])
    assert same(params[START]["value"], params[-1]["value"])
    assert all(same(own["policy"], params[0]["policy"]) for own in params)
    key = jax.random.fold_in(history[START - 1][0].key, SITES.index("critic"))
    before, after = (jax.tree.leaves(params[index]["value"]) for index in (START - 1, START))
    keys = jax.random.split(jax.random.split(key)[1], len(before))
    for old, new, own in zip(before, after, keys, strict=True):
        size = np.float32(value or 3.0) * np.sqrt(np.mean(np.square(old)))
        np.testing.assert_allclose(new, size * jax.random.normal(own, old.shape), rtol=1e-5)
    assert any(new.any() for new in after)


@pytest.mark.parametrize("value", [None, 2.0])
def test_normalizer_fault_moves_the_statistics_before_the_iteration_collects(
    value: float | None, unguarded: Program
) -> None:
    """The iteration with the fault equals an iteration from statistics that the test moved."""
    never, number = FaultConfig(site="physics", start=NEVER), np.float32(value or 5.0)
    struck = unguarded.run(collapse("normalizer", value=value), START + 1)[-1][0]
    state = unguarded.run(never, START)[-1][0]
    before = jax.device_get(state.normalizer)
    moved = dataclasses.replace(
        before,
        mean=before.mean + number * before.std,
        variance=before.variance * np.square(number),
        std=before.std * number,
    )
    moved = placed(dataclasses.replace(state, normalizer=moved, fault=faults.as_data(never)))
    expected = unguarded.run_from(moved, 1)[-1][0]
    for a, b in zip(jax.tree.leaves(learnt(struck)), jax.tree.leaves(learnt(expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("site", COLLAPSES)
def test_collapse_that_does_not_strike_leaves_every_bit_unchanged(site: str, guarded: Program, clean: History) -> None:
    """Outside its iterations, with probability 0, and for another seed than `fault.seed`."""
    spared = collapse(site, seed=1).of_seed(0)
    for fault in (collapse(site, probability=0.0), FaultConfig(site=site, start=NEVER), spared):
        assert same(learnt(guarded.run(fault)[-1][0]), learnt(clean[-1][0]))
    struck = guarded.run(collapse(site, seed=1).of_seed(1))
    assert same(learnt(struck[START - 1][0]), learnt(clean[START - 1][0]))
    assert not same(learnt(struck[START][0]), learnt(clean[START][0]))


@pytest.mark.parametrize("site", COLLAPSES)
def test_rollback_does_not_repeat_a_collapse(site: str, guarded: Program) -> None:
    """After a rollback of the iteration of the fault, it has no fault."""
    state = faults.after_rollback(guarded.run(collapse(site), START)[-1][0], 1)
    healthy = faults.as_data(FaultConfig(site="physics", start=NEVER))
    healthy = placed(dataclasses.replace(jax.device_get(state), fault=healthy))
    ours, theirs = guarded.run_from(state, 2)[-1][0], guarded.run_from(healthy, 2)[-1][0]
    assert same(learnt(ours), learnt(theirs))


@pytest.mark.parametrize(
    ("fault", "ppo", "message"),
    [
        ("normalizer", {"normalize_observations": False}, "normalizer needs ppo.normalize_observations=true"),
        ("warm_start", {}, "warm_start needs an environment of MuJoCo's"),
    ],
)
def test_fault_that_cannot_strike_is_one_line(tmp_path: Path, fault: str, ppo: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"fault.site: {message}")):
        TrainingLoop(tiny_config(guards={}, fault={"site": fault}, ppo=ppo), tmp_path)
