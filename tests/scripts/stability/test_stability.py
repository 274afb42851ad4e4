"""The stability study: rows of seeds, numbers of the page, and best returns of the probe tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rlstable.cli.compose import compose
from scripts.stability import __main__ as stability
from scripts.stability import page as stability_page
from scripts.stability import tasks as stability_tasks
from scripts.stability.page import Task


def row(task: str, side: str, seed: int, returns: list[float | None], **more: Any) -> dict[str, Any]:
    own = {
        "task": task, "side": side, "seed": seed, "settings": [], "steps": [10 * n for n in range(1, len(returns) + 1)],
        "returns": returns, "return_collapsed": 0,
        "stop_reason": "completed", "steps_per_second": 100.0, "commit": "abc1234",
        "versions": {"jax": "1"}, "device": {"platform": "cpu", "kind": "some", "cpus": 2},
    }  # fmt: skip
    return own | more


def save(out: Path, *rows: dict[str, Any]) -> None:
    out.write_text("".join(json.dumps(own) + "\n" for own in rows))


def written(task: str, side: str, seed: int) -> dict[str, Any]:
    return row(task, side, seed, [1.0], settings=stability.settings_of(task, side))


def test_row_of_other_settings_is_trained_again_and_the_last_row_counts() -> None:
    stale = written("hopper", "off", 0) | {"settings": ["env=hopper", "total_steps=1"], "returns": [5.0]}
    assert stability.missing([stale], "hopper", "off", range(1)) == range(1)
    fresh = written("hopper", "off", 0)
    assert not stability.missing([stale, fresh], "hopper", "off", range(1))
    assert stability_page.latest([stale, fresh])["hopper", "off"] == [fresh]


@pytest.mark.parametrize("name", stability.TASKS)
def test_settings_of_every_task_compose(name: str) -> None:
    config = compose([*stability.settings_of(name, "default"), "devices=1"])
    assert config.eval.target_return is None
    assert config.ppo.num_envs <= 64 and config.network.policy_hidden_layer_sizes[0] <= 64
    assert config.env.backend == (None if name == "fast" else "auto")
    assert stability.settings_of(name, "brax") == list(stability.TASKS[name].overrides)


def test_row_of_a_seed_is_read_from_its_run_folder(tmp_path: Path) -> None:
    metrics = [
        {"step": 1, "training/sps": 10.0},
        {"step": 2, "training/sps": 30.0, "eval/episode_reward": 3.0},
        {"step": 3, "training/sps": 20.0},
        {"step": 4, "training/sps": None, "eval/episode_reward": None, "guards/spike/trips": 2, "guards/kl/trips": 0},
    ]
    save(tmp_path / "metrics.jsonl", *metrics)
    save(tmp_path / "events.jsonl", {"kind": "return_collapsed"}, {"kind": "rolled_back"}, {"kind": "rolled_back"})
    (tmp_path / "result.json").write_text(json.dumps({"stop_reason": "policy_collapsed", "return": 2.5}))
    assert stability.seed_row(tmp_path, 7) == {
        "seed": 7, "steps": [2, 4], "returns": [3.0, None], "return_collapsed": 1, "left": 2.5,
        "stop_reason": "policy_collapsed", "steps_per_second": 20.0,
    }  # fmt: skip


def test_returns_are_shares_of_the_best_return() -> None:
    own = row("x", "off", 0, [50.0, 100.0, 70.0, 90.0])
    assert stability_page.kept(own, 0.0).tolist() == [0.5, 1.0, 0.7, 0.9, 0.9]
    # The run ended with its best state instead of the last one.
    assert stability_page.kept(own | {"left": 98.0}, 0.0)[-1] == 0.98
    assert stability_page.returns_of(row("x", "off", 0, [5.0, None])).tolist() == [5.0, 0.0]
    assert stability_page.returns_of(row("x", "off", 0, [-5.0, float("nan")])).tolist() == [-5.0, -5.0]
    assert stability_page.kept(row("x", "off", 0, [0.0, 0.0]), 0.0).tolist() == [1.0, 1.0, 1.0]
    # From the start -50: the best gains 40, the last evaluation keeps 30 of them.
    by = {
        ("x", side): [row("x", side, 0, [start, -10.0, -20.0])] for side, start in (("off", -60.0), ("strict", -40.0))
    }
    found = stability_page.numbers(by, "x", "off", Task((), from_start=True))
    assert found is not None and found.last.tolist() == [0.75] and found.fell.tolist() == [True]


def test_probability_of_improvement_compares_curves_at_equal_steps() -> None:
    off = [row("x", "off", seed, [10.0, 20.0]) for seed in range(2)]
    # The third evaluation of both is beyond the steps of `off`: 15 again, and 25.
    ours = [row("x", "default", 0, [10.0, 20.0, 900.0]), row("x", "default", 1, [20.0, 30.0, 0.0])]
    drawn = stability_page.improvement(ours, off)
    assert drawn[0] == 0.75  # two wins, two draws
    assert drawn[1:].min() == 0.5 and drawn[1:].max() == 1.0


def test_numbers_of_a_side_equal_those_computed_by_hand() -> None:
    rows = [
        row("x", "off", 0, [100.0, 90.0]),
        row("x", "off", 1, [50.0, 100.0]),
        row("x", "default", 0, [100.0, 70.0], return_collapsed=2),
        row("x", "default", 1, [100.0, 95.0]),
        row("x", "brax", 0, [100.0, 50.0]),
    ]
    by = stability_page.latest(rows)
    ours = stability_page.numbers(by, "x", "default", Task(()))
    assert ours is not None and ours.last.tolist() == [0.7, 0.95]
    assert stability_page.cells(ours, False)[1:] == [
        "1 of 2 (50.0%)", "1 of 2 (50.0%)", "0.75 [0.00, 1.00]", "2", "0.70 (seed 0)",
    ]  # fmt: skip
    rival = stability_page.cells(stability_page.numbers(by, "x", "brax", Task(())), True)
    assert (rival[0], *rival[4:]) == ("0.50", "", "0.50 (x 0)")
    assert stability_page.numbers(by, "x", "strict", Task(())) is None
    assert set(stability_page.cells(None, True)) == {""}


def test_page_shows_rewards_of_every_scale_side_by_side(tmp_path: Path) -> None:
    tasks = {
        f"x{factor:g}": Task((), best=100.0 * factor, scaled=("toy", factor)) for factor in stability.REWARD_FACTORS
    }
    rows = [
        row(name, "default", seed, [0.4 * task.best, (0.9 + 0.1 * seed) * task.best])
        for name, task in tasks.items()
        for seed in (0, 1)
    ]
    stability_page.write(rows, tasks, tmp_path / "stability.jsonl")
    page = (tmp_path / "stability.md").read_text()
    for factor in stability.REWARD_FACTORS:
        assert f"| toy | {factor} | 2 | 0.950 | 0.900 |" in page


def test_over_all_tasks_returns_weigh_seeds_and_improvement_weighs_tasks() -> None:
    by = stability_page.latest(
        [
            *(row("a", "off", seed, [1.0]) for seed in range(3)),
            *(row("a", "default", seed, [2.0]) for seed in range(3)),
            row("b", "off", 0, [2.0]),
            row("b", "default", 0, [2.0, 1.0]),
        ]
    )
    parts = [stability_page.numbers(by, name, "default", Task(())) for name in ("a", "b")]
    found = stability_page.together([own for own in parts if own is not None])
    assert found.last.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert found.improvement is not None and found.improvement[0] == 0.75  # 1 and 0.5
    assert found.names[-1] == "b 0"


def test_page_has_every_side_and_only_measured_tasks(tmp_path: Path) -> None:
    """The first paragraph is the answer, and the picture is beside the page."""
    tasks = {"toy": Task(("env=fast",), best=10.0), "never": Task(())}
    out = tmp_path / "stability.jsonl"
    rows = [
        row("toy", side, seed, [8.0, 5.0 if side == "off" else 8.0]) for side in ("off", "default") for seed in (0, 1)
    ]
    rows[-1]["stop_reason"] = "policy_collapsed"
    stability_page.write(rows, tasks, out)
    page = (tmp_path / "stability.md").read_text()
    assert (
        "`guards=default` 0 of 2 (0.0%) at the end, 0 of 2 (0.0%) at any later time; `guards=off` 2 of 2"
        in page.split("\n\n")[1]
    )
    assert "| guards=strict |  |  |" in page and "| toy | guards=off |" in page and "| never |" not in page
    assert "| 0.80 | `policy_collapsed` 1 |" in page
    assert (tmp_path / "stability.png").read_bytes().startswith(b"\x89PNG")


def best_force(obs: jax.Array) -> jax.Array:
    """Returns the best action, `[1]`: the force after which the point is nearest to the target.

    Full force brings the point to the target soonest. A force that stops the point within one step always exists, so
    that nearness now never costs nearness later. After a kick the point keeps its velocity, which is 0 at the target.
    """
    wanted = (stability_tasks.TARGET - obs[0]) / stability_tasks._SECONDS
    return jnp.clip((wanted - stability_tasks._KEPT * obs[1:]) / (1.0 - stability_tasks._KEPT), -1.0, 1.0)


def best_return(probe: stability_tasks.Probe, episodes: int = 20_000) -> float:
    env = stability_tasks.PointMass(**probe.kwargs)

    def step(state: Any, _: None) -> tuple[Any, jax.Array]:
        state = env.step(state, best_force(state.obs))
        return state, state.reward

    def play(key: jax.Array) -> jax.Array:
        return jax.lax.scan(step, env.reset(key), length=probe.episode_length)[1].sum()

    return float(jax.jit(jax.vmap(play))(jax.random.split(jax.random.PRNGKey(0), episodes)).mean())


@pytest.mark.parametrize("name", ["point_mass", "critic_too_small", "solved_constant", "rare_kick"])
def test_best_return_of_a_probe_is_that_of_the_best_force(name: str) -> None:
    """A kick changes a return by a few units, so the mean of 20,000 episodes is accurate to 0.1 %."""
    probe = stability_tasks.PROBES[name]
    tolerance = 2e-3 if "rare" in probe.kwargs else 2e-4
    assert best_return(probe) == pytest.approx(probe.best, rel=tolerance)


@pytest.mark.parametrize("name", stability_tasks.PROBES)
def test_task_has_the_best_return_of_its_probe_which_grows_with_rewards(name: str) -> None:
    probe, plain = stability_tasks.PROBES[name], stability_tasks.PROBES["point_mass"]
    task = f"point_mass_{name}" if name.startswith("rewards_x") else name
    assert stability.TASKS[task].best == probe.best
    if "scale" in probe.kwargs:
        assert probe.best == pytest.approx(plain.best * probe.kwargs["scale"], rel=2e-4)
