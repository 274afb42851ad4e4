"""The stability study: its settings, numbers of its page, and best returns of the probe tasks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rlstable.cli.compose import compose
from scripts.stability import __main__ as stability
from scripts.stability import page, tasks
from scripts.stability.page import Task


def row(side: str, seed: int, *returns: float | None, task: str = "x", **more: Any) -> dict[str, Any]:
    steps = [10 * n for n in range(1, len(returns) + 1)]
    own = {"task": task, "side": side, "seed": seed, "steps": steps, "returns": [*returns]}
    return {**own, "return_collapsed": 0, "stop_reason": "completed", **more}


@pytest.mark.parametrize("name", stability.TASKS)
def test_settings_of_every_task_compose(name: str) -> None:
    config = compose([*stability.settings_of(name, "default"), "devices=1"])
    assert config.eval.target_return is None
    assert config.ppo.num_envs <= 64 and config.network.policy_hidden_layer_sizes[0] <= 64
    assert config.env.backend == (None if name == "fast" else "auto")
    assert stability.settings_of(name, "brax") == list(stability.TASKS[name].overrides)


def test_returns_are_shares_of_the_best_return() -> None:
    own = row("off", 0, 50.0, 100.0, 70.0, 90.0)
    assert page.kept(own, 0.0).tolist() == [0.5, 1.0, 0.7, 0.9, 0.9]
    # The run ended with its best state instead of the last one.
    assert page.kept(own | {"left": 98.0}, 0.0)[-1] == 0.98
    assert page.returns_of(row("off", 0, 5.0, None)).tolist() == [5.0, 0.0]
    assert page.returns_of(row("off", 0, -5.0, float("nan"))).tolist() == [-5.0, -5.0]
    assert page.kept(row("off", 0, 0.0, 0.0), 0.0).tolist() == [1.0, 1.0, 1.0]
    # From the start -50: the best gains 40, the last evaluation keeps 30 of them.
    by = page.latest([row("off", 0, -60.0, -10.0, -20.0), row("strict", 0, -40.0, -10.0, -20.0)])
    found = page.numbers(by, "x", "off", Task((), from_start=True))
    assert found is not None and found.last.tolist() == [0.75] and found.fell.tolist() == [True]


def test_probability_of_improvement_compares_curves_at_equal_steps() -> None:
    off = [row("off", seed, 10.0, 20.0) for seed in range(2)]
    # The third evaluation of both is beyond the steps of `off`: 15 again, and 25.
    drawn = page.improvement([row("default", 0, 10.0, 20.0, 900.0), row("default", 1, 20.0, 30.0, 0.0)], off)
    assert drawn[0] == 0.75  # two wins, two draws
    assert drawn[1:].min() == 0.5 and drawn[1:].max() == 1.0


def test_numbers_of_a_side_equal_those_computed_by_hand() -> None:
    stale = row("off", 0, 1.0)  # the last row of a seed counts
    off = [stale, row("off", 0, 100.0, 90.0), row("off", 1, 50.0, 100.0)]
    default = [row("default", 0, 100.0, 70.0, return_collapsed=2), row("default", 1, 100.0, 95.0)]
    by = page.latest([*off, *default, row("brax", 0, 100.0, 50.0)])
    assert page.numbers(by, "x", "strict", Task(())) is None
    ours, rival = (page.numbers(by, "x", side, Task(())) for side in ("default", "brax"))
    assert ours is not None and rival is not None
    half = "1 of 2 (50.0%)"
    assert page.cells(ours, False) == ["0.82 [0.70, 0.95]", half, half, "0.75 [0.00, 1.00]", "2", "0.70 (seed 0)"]
    assert page.cells(rival, True)[::5] == ["0.50", "0.50 (x 0)"]


def test_over_all_tasks_returns_weigh_seeds_and_improvement_weighs_tasks() -> None:
    first = [row(side, seed, value) for side, value in (("off", 1.0), ("default", 2.0)) for seed in range(3)]
    by = page.latest([*first, row("off", 0, 2.0, task="b"), row("default", 0, 2.0, 1.0, task="b")])
    parts = [page.numbers(by, name, "default", Task(())) for name in ("x", "b")]
    found = page.together([own for own in parts if own is not None])
    assert found.last.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert found.improvement is not None and found.improvement[0] == 0.75  # 1 and 0.5
    assert found.names[-1] == "b 0"


def best_force(obs: jax.Array) -> jax.Array:
    """Returns the best action, `[1]`: the force after which the point is nearest to the target.

    Full force brings the point to the target soonest. A force that stops the point within one step always exists, so
    that nearness now never costs nearness later. After a kick the point keeps its velocity, which is 0 at the target.
    """
    wanted = (tasks.TARGET - obs[0]) / tasks._SECONDS
    return jnp.clip((wanted - tasks._KEPT * obs[1:]) / (1.0 - tasks._KEPT), -1.0, 1.0)


def best_return(probe: tasks.Probe, episodes: int = 20_000) -> float:
    env = tasks.PointMass(**probe.kwargs)

    def step(state: Any, _: None) -> tuple[Any, jax.Array]:
        state = env.step(state, best_force(state.obs))
        return state, state.reward

    def play(key: jax.Array) -> jax.Array:
        return jax.lax.scan(step, env.reset(key), length=probe.episode_length)[1].sum()

    return float(jax.jit(jax.vmap(play))(jax.random.split(jax.random.PRNGKey(0), episodes)).mean())


@pytest.mark.parametrize("name", ["point_mass", "critic_too_small", "solved_constant", "rare_kick"])
def test_best_return_of_a_probe_is_that_of_the_best_force(name: str) -> None:
    """A kick changes a return by a few units, so the mean of 20,000 episodes is accurate to 0.1 %."""
    probe = tasks.PROBES[name]
    assert best_return(probe) == pytest.approx(probe.best, rel=2e-3 if "rare" in probe.kwargs else 2e-4)


def test_tasks_have_the_best_returns_of_their_probes_which_grow_with_rewards() -> None:
    for name, probe in tasks.PROBES.items():
        assert stability.TASKS[f"point_mass_{name}" if name.startswith("rewards_x") else name].best == probe.best
        if "scale" in probe.kwargs:
            assert probe.best == pytest.approx(tasks.PROBES["point_mass"].best * probe.kwargs["scale"], rel=2e-4)
