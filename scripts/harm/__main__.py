"""Compares returns with the default guards and without guards, on small environments as users write them.

python -m scripts.harm                  # all cases, one line per case; resumes where it stopped
python -m scripts.harm --page           # docs/harm.md from the results

All seeds of a case train in one program. A return is that of the last policy, not of the best one.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlstable
from rlstable.policy import statistics
from rlstable.supervise.stop_reasons import FROM_OUTSIDE
from scripts import pages, results
from scripts.harm.environments import CASES, Case, Point
from scripts.results import Row

SIDES = ("off", "default")
STEPS = 200_000
PPO = {"num_envs": 32, "batch_size": 32, "num_minibatches": 8, "unroll_length": 16, "learning_rate": 1e-3}


def run_case(name: str, guards: str, seeds: Sequence[int]) -> Row:
    case: Case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        result = rlstable.fit(
            {"name": "scripts.harm.environments:Point", "kwargs": case.kwargs}, run_dir=folder, guards=guards,
            seed=seeds[0], seeds=len(seeds), total_steps=STEPS, network="small", ppo=PPO, devices=1, logging="quiet",
            checkpoint="off", eval={"num_envs": 32, "num_evals": 4, "env_kwargs": case.eval_kwargs},
            overrides=["ppo=default", f"env.episode_length={case.length}", *case.overrides],
        )  # fmt: skip
        if result.stop_reason in FROM_OUTSIDE:
            raise SystemExit(result.stop_reason.exit_code)
        folders = [Path(folder) / f"seed-{seed}" for seed in seeds]
        fields = [json.loads((seed / "result.json").read_text()) for seed in folders]
        events = Counter(row["kind"] for seed in folders for row in results.read(seed / "events.jsonl"))
    return {
        "case": name, "guards": guards, "seeds": list(seeds), "steps": STEPS,
        "idle": idle_return(case),
        "returns": [field["last_return"] for field in fields], "endings": [field["stop_reason"] for field in fields],
        "rollbacks": events["rolled_back"], "trips": events["guard_tripped"], "commit": results.commit(),
    }  # fmt: skip


def idle_return(case: Case) -> float:
    """Mean return of the action 0, without observations, over 64 episodes."""
    env = Point(**{**case.kwargs, **case.eval_kwargs})

    def episode(key: jax.Array) -> jax.Array:
        def step(carry: Any, _: None) -> Any:
            state, runs = carry
            state = env.step(state, jnp.zeros(env.action_size))
            return (state, runs * (1.0 - state.done)), runs * state.reward

        start = env.reset(key)
        return jnp.sum(jax.lax.scan(step, (start, jnp.ones(())), None, case.length)[1])

    return float(jnp.nanmean(jax.jit(jax.vmap(episode))(jax.random.split(jax.random.PRNGKey(0), 64))))


def compare(rows: Sequence[Row], name: str) -> dict[str, Any] | None:
    """Returns and their difference, as a share of what training without guards gains; None if a side is missing."""
    by = {side: results.matching(rows, case=name, guards=side) for side in SIDES}
    if not all(by.values()):
        return None
    found: dict[str, Any] = {"idle": (idle := by["off"][0]["idle"])}
    for side, own in by.items():
        returns = np.array([value for row in own for value in row["returns"]], float)  # NaN of a lost seed
        found |= {side: np.where(np.isnan(returns), idle, returns), f"lost_{side}": int(np.isnan(returns).sum())}
    off, default = found["off"], found["default"]
    gain = max(abs(off.mean() - idle), 0.02 * abs(off.mean()), 1e-12)
    count = min(off.size, default.size)
    difference = statistics.estimate((default[:count] - off[:count]) / gain)
    sums = {name: sum(row[name] for row in by["default"]) for name in ("rollbacks", "trips")}
    return {**found, **sums, "difference": difference}


def line_of(rows: Sequence[Row], name: str) -> list[str]:
    """Returns a case's line of the page; empty if a side is missing."""
    found = compare(rows, name)
    if found is None:
        return []
    off, default, share = found["off"], found["default"], found["difference"]
    interval = f"{100 * share.value:+.0f} % [{100 * share.low:+.0f}, {100 * share.high:+.0f}]"
    numbers = [f"{value:,.4g}" for value in (found["idle"], off.mean(), off.min(), default.mean(), default.min())]
    for place, side in ((1, "off"), (3, "default")):
        if found[f"lost_{side}"]:
            numbers[place] = f"{found[f'lost_{side}']} seeds lost"
    if found["lost_off"] == off.size:
        interval = "no return without guards"
    return [name, CASES[name].text, str(off.size), *numbers, interval, f"{found['trips']} / {found['rollbacks']}"]


def write_page(rows: Sequence[Row], path: Path) -> None:
    lines = [line for name in CASES if (line := line_of(rows, name))]
    pages.fill(path, {"results": "\n".join(pages.table(_HEADER, lines, (0, 1)))})


_HEADER = (
    "case", "environment", "seeds", "action 0", "off", "off, least", "default", "default, least", "difference [95 %]",
    "trips / rollbacks",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = results.study_parser(__doc__, Path("docs/harm.jsonl"), only=CASES)
    parser.add_argument("--seeds", type=int, default=8, help="seeds per side; default: 8")
    parser.add_argument("--first", type=int, default=0, help="first seed; default: 0")
    asked = parser.parse_args(argv)
    seeds = range(asked.first, asked.first + asked.seeds)
    for name in () if asked.page else asked.only or CASES:
        for side in SIDES:
            known = results.matching(results.read(asked.out), case=name, guards=side)
            if not any(set(seeds) <= set(row["seeds"]) for row in known):
                results.add(asked.out, [run_case(name, side, seeds)])
        print(", ".join(line_of(results.read(asked.out), name)), flush=True)
    write_page(results.read(asked.out), asked.out.with_suffix(".md"))


if __name__ == "__main__":
    main()
