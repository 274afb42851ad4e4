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
from rlstable.faults import SITES
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


# --- collapses: finite faults of the training state ----------------------------------------------------------


def collapse(site: str, **changes: Any) -> FaultConfig:
    return FaultConfig(site=site, start=START, iterations=1, **changes)


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
