"""Injected faults: one compiled program runs them all, and each trips only its own guard."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from toys import GUARDS_OFF, Physics, PointMass, State, compiled, placed, tiny_config

from rlstable import faults
from rlstable.config import Config, ConfigError
from rlstable.config.faults import FaultConfig
from rlstable.envs.resets import Resets
from rlstable.envs.vector import VectorEnv
from rlstable.faults import SITES
from rlstable.guards.env import env_guards
from rlstable.io.checkpoint import Checkpoints
from rlstable.policy import load_policy
from rlstable.ppo.build import init_state, make_ppo
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import Metrics, TrainState
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.result import Result
from rlstable.supervise.stop_reasons import StopReason

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


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that was compiled ahead, so that calling it cannot compile another, and its first state."""

    ppo: PPO
    state: TrainState
    devices: int
    call: Callable[[TrainState], tuple[TrainState, Metrics]]

    def run(self, fault: FaultConfig, iterations: int = TOTAL) -> list[tuple[TrainState, Metrics]]:
        """State and metrics after each iteration with a fault."""
        state = placed(dataclasses.replace(self.state, fault=faults.as_data(fault)), self.devices)
        return self.run_from(state, iterations)

    def run_from(self, state: TrainState, iterations: int) -> list[tuple[TrainState, Metrics]]:
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
    vector = VectorEnv(env, config.env.episode_length, config.env.action_repeat, env_guards(config.guards))
    vector = faults.faulty_env(vector, config.fault)
    resets, count = Resets(vector, config.ppo.num_envs), config.ppo.num_envs
    env_state = resets.draw(jax.random.PRNGKey(config.seed), count)
    pool = resets.pool(jax.random.PRNGKey(config.seed + 1), count) if vector.uses_pool else None
    ppo = faults.arm(make_ppo(config, vector, env.action_size))
    return ppo, faults.armed_state(init_state(ppo, jax.random.PRNGKey(config.seed + 2), env_state, pool), config.fault)


def program(guards: dict[str, Any], devices: int = 1) -> Program:
    ppo, state = armed(tiny_config(guards=guards, fault={"site": "warm_start", "start": NEVER}), Solver())
    state = placed(state, devices)
    return Program(ppo, state, devices, compiled(ppo, devices).lower(state).compile())


@pytest.fixture(scope="module")
def guarded() -> Program:
    return program({})


@pytest.fixture(scope="module")
def unguarded() -> Program:
    return program(GUARDS_OFF)


@pytest.fixture(scope="module")
def clean(guarded: Program) -> list[tuple[TrainState, Metrics]]:
    return guarded.run(FaultConfig(site="physics", start=NEVER))


def learnt(state: TrainState) -> Any:
    return state.params, state.opt_state, state.normalizer


def finite(tree: Any) -> bool:
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


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
def test_fault_trips_its_guard_during_its_iterations_only(
    site: str, guarded: Program, clean: list[tuple[TrainState, Metrics]]
) -> None:
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


@pytest.mark.slow
def test_fault_is_the_same_on_every_device() -> None:
    own = program({}, devices=8)
    guards = {
        "physics": {"quarantine.physics"},
        "gradient": {"finite_update.gradient"},
        "critic": set(),
        "normalizer": set(),
    }
    for site, expected in guards.items():
        history = own.run(window(site))
        for index, (state, metrics) in enumerate(history):
            for leaf in jax.tree.leaves((learnt(state), state.tuning, state.guard_memory, metrics)):
                assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
            assert set(own.trips(metrics)) == (expected if START <= index < START + LENGTH else set())
        assert finite(learnt(history[-1][0]))


# --- collapses: finite faults of the training state ----------------------------------------------------------


def collapse(site: str, **changes: Any) -> FaultConfig:
    return FaultConfig(site=site, start=START, iterations=1, **changes)


def idle(own: Program) -> Program:
    """The same program at a learning rate of 0, so that only a fault changes the parameters."""
    tuning = dataclasses.replace(own.state.tuning, learning_rate=jnp.zeros(()))
    return dataclasses.replace(own, state=placed(dataclasses.replace(own.state, tuning=tuning), own.devices))


@pytest.mark.parametrize("guards", ["guarded", "unguarded"])
@pytest.mark.parametrize("value", [None, 7.0])
def test_critic_fault_replaces_value_parameters_by_noise_of_their_size(
    guards: str, value: float | None, request: pytest.FixtureRequest
) -> None:
    history = idle(request.getfixturevalue(guards)).run(collapse("critic", value=value))
    params = [jax.tree.map(lambda x: x + 0.0, jax.device_get(state.params)) for state, _ in history]  # -0.0 is 0.0
    assert same(params[START - 1]["value"], idle(request.getfixturevalue(guards)).state.params["value"])
    assert same(params[START]["value"], params[-1]["value"])
    assert all(same(own["policy"], params[0]["policy"]) for own in params)
    key = jax.random.fold_in(history[START - 1][0].key, SITES.index("critic"))
    before, after = (jax.tree.leaves(params[index]["value"]) for index in (START - 1, START))
    keys = jax.random.split(jax.random.split(key)[1], len(before))
    for old, new, own in zip(before, after, keys, strict=True):
        size = np.float32(value or 3.0) * np.sqrt(np.mean(np.square(old)))
        np.testing.assert_allclose(new, size * jax.random.normal(own, old.shape), rtol=1e-5)
    assert any(new.any() for new in after)


@pytest.mark.parametrize("guards", ["guarded", "unguarded"])
@pytest.mark.parametrize("value", [None, 2.0])
def test_normalizer_fault_moves_the_statistics_before_the_iteration_collects(
    guards: str, value: float | None, request: pytest.FixtureRequest
) -> None:
    """The iteration with the fault equals an iteration from statistics that the test moved."""
    own: Program = request.getfixturevalue(guards)
    never, number = faults.as_data(FaultConfig(site="physics", start=NEVER)), np.float32(value or 5.0)
    history = own.run(collapse("normalizer", value=value), START + 1)
    state = own.run(FaultConfig(site="physics", start=NEVER), START)[-1][0]
    before = jax.device_get(state.normalizer)
    moved = dataclasses.replace(
        before,
        mean=before.mean + number * before.std,
        variance=before.variance * np.square(number),
        std=before.std * number,
    )
    state, _ = own.run_from(placed(dataclasses.replace(state, normalizer=moved, fault=never)), 1)[-1]
    for a, b in zip(jax.tree.leaves(learnt(state)), jax.tree.leaves(learnt(history[-1][0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    after = jax.device_get(history[-1][0].normalizer)
    clean = jax.device_get(own.run(FaultConfig(site="physics", start=NEVER), START + 1)[-1][0].normalizer)
    # The limiter may take in the next batch in part only, of which the rest counts as not seen.
    assert int(after.count) <= int(clean.count) if guards == "guarded" else int(after.count) == int(clean.count)
    assert (after.std > 1.2 * clean.std).all() and (after.mean > clean.mean + 0.5 * clean.std).all()


@pytest.mark.parametrize("site", COLLAPSES)
@pytest.mark.parametrize("guards", ["guarded", "unguarded"])
def test_collapse_that_does_not_strike_leaves_every_bit_unchanged(
    site: str, guards: str, request: pytest.FixtureRequest
) -> None:
    """Outside its iterations, with probability 0, and for another seed than `fault.seed`."""
    own: Program = request.getfixturevalue(guards)
    free = own.run(FaultConfig(site="physics", start=NEVER))
    spared = collapse(site, seed=1).of_seed(0)
    for fault in (collapse(site, probability=0.0), FaultConfig(site=site, start=NEVER), spared):
        assert same(learnt(own.run(fault)[-1][0]), learnt(free[-1][0]))
    struck = own.run(collapse(site, seed=1).of_seed(1))
    assert same(learnt(struck[START - 1][0]), learnt(free[START - 1][0]))
    assert not same(learnt(struck[START][0]), learnt(free[START][0]))


@pytest.mark.parametrize("site", COLLAPSES)
@pytest.mark.parametrize("undone", [1, 2])
def test_rollback_does_not_repeat_a_collapse(site: str, undone: int, guarded: Program) -> None:
    """After a rollback of every iteration since the fault, the same iterations have no fault."""
    fault = collapse(site)
    good = (
        guarded.run(fault, START + 1 - undone)[-1][0]
        if undone <= START
        else placed(dataclasses.replace(guarded.state, fault=faults.as_data(fault)))
    )
    state = faults.after_rollback(good, undone)
    healthy = placed(
        dataclasses.replace(jax.device_get(state), fault=faults.as_data(FaultConfig(site="physics", start=NEVER)))
    )
    ours, theirs = guarded.run_from(state, 2)[-1][0], guarded.run_from(healthy, 2)[-1][0]
    assert same(learnt(ours), learnt(theirs))


# --- faults in a whole run -----------------------------------------------------------------------------------


def quick(**sections: Any) -> Config:
    defaults: dict[str, Any] = {
        "guards": {}, "devices": 1, "total_steps": 4 * STEPS, "logging": {"console": "off"},
        "eval": {"num_evals": 1, "num_envs": 16}, "checkpoint": {"every": 1, "keep": 4},
    }  # fmt: skip
    return tiny_config(**defaults | sections)


def finish(folder: Path, **sections: Any) -> tuple[TrainingLoop, Result, list[dict[str, Any]]]:
    runner = TrainingLoop(quick(**sections), folder)
    result = runner.run()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return runner, result, events


def test_full_disk_loses_checkpoints_and_the_run_continues(tmp_path: Path) -> None:
    runner, result, events = finish(tmp_path, fault={"site": "disk", "start": 2})
    assert result.stop_reason is StopReason.not_saved
    failed = [event for event in events if event["kind"] == "checkpoint_failed"]
    assert [event["iteration"] for event in failed] == [3, 4, 4]  # the last save is tried again at the end
    assert all("No space left on device" in event["error"] for event in failed)
    assert finite(learnt(runner.single.state))
    with Checkpoints(tmp_path, runner.config.checkpoint) as checkpoints:
        assert checkpoints.all() == [1, 2]
        restored, host = checkpoints.restore(runner.single.state)
    assert int(restored.counters.iterations) == host["host"]["iteration"] == 2
    assert finite(learnt(restored))
    assert finite(load_policy(tmp_path).act(np.zeros(4, np.float32)))


def test_failing_logger_is_logged_once_and_the_run_completes(tmp_path: Path) -> None:
    _, result, events = finish(tmp_path, fault={"site": "sinks", "start": 1})
    assert result.stop_reason is StopReason.completed
    assert [event["kind"] for event in events if event["kind"].endswith("_failed")] == ["sink_failed"]
    assert "the service does not answer" in json.dumps(events)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert load_policy(tmp_path, "latest").host["host"]["iteration"] == 4


def test_normalizer_fault_needs_a_normalizer() -> None:
    ppo = {"normalize_observations": False}
    with pytest.raises(ConfigError, match=re.escape("fault.site: normalizer needs ppo.normalize_observations=true")):
        quick(fault={"site": "normalizer"}, ppo=ppo)


@pytest.mark.parametrize("enabled", [True, False])
def test_evaluation_has_the_fault_only_if_configured(enabled: bool, tmp_path: Path) -> None:
    fault = {"site": "observation", "probability": 0.05, "eval": enabled}
    _, result, events = finish(tmp_path, fault=fault)
    assert any(event["kind"] == "guard_tripped" and event["guard"] == "quarantine" for event in events)
    share = result.metrics["eval/aborted_share"]
    assert share is not None
    assert (0.0 < share < 1.0) if enabled else share == 0.0


def test_warm_start_fault_needs_an_environment_of_mujoco(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("fault.site: warm_start needs an environment of MuJoCo's")):
        TrainingLoop(quick(fault={"site": "warm_start"}), tmp_path)


def test_run_without_a_fault_has_neither_a_faulty_ppo_nor_a_faulty_environment(tmp_path: Path) -> None:
    runner = TrainingLoop(quick(), tmp_path)
    runner.single.checkpoints.close()
    runner.single.log.logbook.close()
    assert type(runner.single.programs.setup.ppo) is PPO
    assert type(runner.single.programs.setup.ppo.env.env) is PointMass
    assert runner.single.state.fault is None
