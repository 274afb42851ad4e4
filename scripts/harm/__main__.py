"""Compares returns with the default guards and without guards, on small environments as users write them.

python -m scripts.harm                  # all cases, one line per case; resumes where it stopped
python -m scripts.harm --page           # docs/harm.md from the results

All seeds of a case train in one program, by the plain command. A return is that of the last policy, not of the best.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config.overrides import literal
from rlstable.envs.episodes import run_episodes
from rlstable.envs.vector import VectorEnv
from rlstable.guards.env import Quarantine
from rlstable.policy import statistics
from scripts import pages, results, study
from scripts.harm.environments import CASES, Point
from scripts.results import Row
from scripts.rivals.brax_rival import mean_return
from scripts.study import Cell

SIDES = ("off", "default")
STEPS = 200_000
_SETTINGS = (
    "env=import", "env.name=scripts.harm.environments:Point", "network=small", "ppo=default", f"total_steps={STEPS}",
    "ppo.num_envs=32", "ppo.batch_size=32", "ppo.num_minibatches=8", "ppo.unroll_length=16", "ppo.learning_rate=1e-3",
    "eval.num_envs=32", "eval.num_evals=4", "devices=1", "logging=quiet", "checkpoint=off",
)  # fmt: skip


def settings_of(name: str, side: str) -> list[str]:
    case = CASES[name]
    kwargs = (f"env.kwargs={literal(case.kwargs)}", f"eval.env_kwargs={literal(case.eval_kwargs)}")
    return [*_SETTINGS, *kwargs, f"env.episode_length={case.length}", f"guards={side}", *case.overrides]


def train(name: str, side: str, seeds: range) -> Iterator[Row]:
    with study.trained(settings_of(name, side), seeds) as (runs, _):
        for run in runs:
            result = run.result
            yield {
                "seed": run.seed, "steps": STEPS, "idle": idle_return(name), "return": result["last_return"],
                "ending": result["stop_reason"], "rollbacks": run.events("rolled_back"),
                "trips": run.events("guard_tripped"),
            }  # fmt: skip


@functools.cache
def idle_return(name: str) -> float | None:
    """Mean return of the action 0, without observations, over 64 episodes."""
    case = CASES[name]
    env = Point(**{**case.kwargs, **case.eval_kwargs})
    envs, key = VectorEnv(env, case.length, 1, {"quarantine": Quarantine()}), jax.random.PRNGKey(0)
    idle = jnp.zeros((64, env.action_size))
    return mean_return(jax.jit(lambda keys: run_episodes(envs, lambda *_: idle, keys, key))(jax.random.split(key, 64)))


def line_of(rows: Sequence[Row], name: str) -> list[str]:
    """Returns a case's line of the page; empty if a side is missing.

    The difference of the sides is a share of what training without guards gains.
    """
    by = {side: results.matching(rows, case=name, guards=side) for side in SIDES}
    if not all(by.values()):
        return []
    idle, returns, shown = by["off"][0]["idle"], {}, []
    for side, own in by.items():
        # Older rows have all seeds of a program.
        each = np.array([value for row in own for value in row.get("returns", [row.get("return")])], float)
        lost = np.isnan(each)
        returns[side] = np.where(lost, idle, each)
        mean = f"{lost.sum()} seeds lost" if lost.any() else f"{returns[side].mean():,.4g}"
        shown += [mean, f"{returns[side].min():,.4g}"]
    off, default = returns.values()
    gain = max(abs(off.mean() - idle), 0.02 * abs(off.mean()), 1e-12)
    count = min(off.size, default.size)
    share = statistics.estimate((default[:count] - off[:count]) / gain)
    difference = pages.interval(share, lambda part: f"{100 * part:+.0f}", " %")
    if shown[0] == f"{off.size} seeds lost":
        difference = "no return without guards"
    trips, rollbacks = (sum(row[key] for row in by["default"]) for key in ("trips", "rollbacks"))
    about = [name, CASES[name].text, str(off.size), f"{idle:,.4g}"]
    return [*about, *shown, difference, f"{trips} / {rollbacks}"]


def write_page(rows: Sequence[Row], out: Path) -> None:
    lines = [line for name in CASES if (line := line_of(rows, name))]
    pages.fill(out.with_suffix(".md"), {"results": "\n".join(pages.table(_HEADER, lines, (0, 1)))})


_HEADER = (
    "case", "environment", "seeds", "action 0", "off", "off, least", "default", "default, least", "difference [95 %]",
    "trips / rollbacks",
)  # fmt: skip


def cells(names: Iterable[str], seeds: int) -> Iterator[Cell]:
    for name, side in itertools.product(names, SIDES):
        about = {"case": name, "guards": side}
        yield Cell(f"{name} {side}", about, range(seeds), functools.partial(train, name, side))


def main(argv: Sequence[str] | None = None) -> None:
    asked = results.study_parser(__doc__, Path("docs/harm.jsonl"), 8, only=CASES).parse_args(argv)
    study.run(asked, cells(asked.only or CASES, asked.seeds), write_page)


if __name__ == "__main__":
    main()
