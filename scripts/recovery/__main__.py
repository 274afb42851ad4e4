"""Trains with a learning rate that is far too high, with and without the supervisor.

python -m scripts.recovery                       # all cases, one line per seed; resumes where it stopped
python -m scripts.recovery --page                # docs/recovery.md and its picture from the results

Runs train as a user would start them, one after another. Policies are evaluated on the same episodes.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstable.cli.compose import compose
from rlstable.config import Config, ConfigError
from rlstable.device import sharding
from rlstable.policy import load_policy
from rlstable.policy.evaluator import PolicySnapshot, make_evaluator
from rlstable.ppo.networks import Networks
from rlstable.runner.loop import TrainingLoop
from scripts import pages, results
from scripts.results import Row, matching
from scripts.rivals import brax_rival
from scripts.survival import __main__ as survival

# A thousand times the rate of the task.
TOO_HIGH = ("ppo.learning_rate=0.3",)
# The operations of Brax's PPO and guards that only check results; no limiter bounds a step.
WATCHED = (
    "guards=off", "guards.finite_state.enabled=true", "guards.policy.enabled=true", "guards.value_loss.enabled=true",
)  # fmt: skip
TASK = survival.STEADY
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # label and settings
    "clean": ("the rate of the task, watched, supervised", WATCHED),
    "unwatched": ("0.3, not watched", (*TOO_HIGH, "guards=off")),
    "unsupervised": ("0.3, watched, no second attempt", (*TOO_HIGH, *WATCHED, "supervise=off")),
    "supervised": ("0.3, watched, supervised", (*TOO_HIGH, *WATCHED)),
    "limited": ("0.3, guards=default, no second attempt", (*TOO_HIGH, "guards=default", "supervise=off")),
}
EVALUATIONS = 20


def mean_return(config: Config, networks: Networks, params: Any, statistics: Any) -> float | None:
    evaluator = make_evaluator(config, networks, contextlib.nullcontext, print)
    return evaluator.evaluate([PolicySnapshot(params, statistics, jax.random.PRNGKey(0))])[0]["eval/episode_reward"]


def run_seed(case: str, seed: int, overrides: Sequence[str]) -> Row:
    evaluations = [f"eval.num_evals={EVALUATIONS}", f"eval.num_envs={survival.EPISODES}", "eval.target_return=null"]
    config = compose([*overrides, *evaluations, "logging=quiet", "devices=1", f"seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        loop = TrainingLoop(config, folder)
        result = loop.run()
        rollbacks = matching(results.read(Path(folder) / "events.jsonl"), kind="rolled_back")
        run = loop.single
        networks, best = run.setup.ppo.networks, None
        with contextlib.suppress(ConfigError):  # the run saved no policy
            policy = load_policy(folder)
            best = mean_return(config, networks, policy.params, policy.statistics)
    last = mean_return(config, networks, *sharding.first_device((run.state.params, run.state.normalizer)))
    tuning = jax.device_get(run.state.tuning)
    curve = [(row["step"], row["eval/episode_reward"]) for row in result.history if "eval/episode_reward" in row]
    return {
        "case": case, "seed": seed, "ending": result.stop_reason.name, "return": last, "best": best,
        "remedies": [event["remedy"] for event in rollbacks], "back_at": [event["step"] for event in rollbacks],
        "causes": sorted({event["cause"] for event in rollbacks}), "steps": run.host.logged_step,
        "lost_steps": run.host.attempts.lost_steps, "rate": float(tuning.learning_rate * tuning.learning_rate_scale),
        "curve": curve, "seconds": round(run.host.elapsed, 1),
    }  # fmt: skip


def run_case(case: str, seeds: int, out: Path, overrides: Sequence[str]) -> None:
    known = {row["seed"] for row in matching(results.read(out), case=case)}
    for seed in sorted({*range(seeds)} - known):
        row = run_seed(case, seed, overrides)
        results.add(out, [row])
        shown = [None if row[key] is None else round(row[key]) for key in ("return", "best")]
        remedies = ", ".join(row["remedies"])
        ended = f"{row['ending']:18} last, best {shown} rate {row['rate']:.3g} {remedies}"
        print(f"{case:13} seed {seed} {ended}", flush=True)


def spread(numbers: Sequence[float], form: str = ",.0f") -> str:
    return f"{np.median(numbers):{form}} [{min(numbers):{form}}, {max(numbers):{form}}]"


def _cells(case: str, rows: Sequence[Row], clean: float) -> tuple[str, ...]:
    endings = ", ".join(f"`{name}` {count}" for name, count in Counter(row["ending"] for row in rows).items())
    last = [row["return"] or 0.0 for row in rows]
    best = [row["best"] for row in rows if row["best"] is not None]
    saved = spread(best) if len(best) == len(rows) else f"none in {len(rows) - len(best)} of {len(rows)}"
    rollbacks, rates = [len(row["remedies"]) for row in rows], [row["rate"] for row in rows]
    share = spread([value / clean for value in last], ".2f")
    return CASES[case][0], endings, spread(last), share, saved, spread(rollbacks), spread(rates, ".2g")


def write(rows: Sequence[Row], out: Path) -> None:
    by = {case: own for case in CASES if (own := matching(rows, case=case))}
    if "clean" not in by:
        return
    clean = float(np.median([row["return"] or 0.0 for row in by["clean"]]))
    header = ("rate and guards", "ending", "last policy", "share", "best policy", "rollbacks", "last learning rate")
    lines = pages.table(header, (_cells(case, own, clean) for case, own in by.items()), (0, 1))
    if "supervised" in by:
        orders = Counter(", ".join(row["remedies"]) for row in by["supervised"])
        lines += ["", "Remedies of the supervised seeds, in order:", ""]
        lines += [f"- {order or 'none'}: {count} seeds" for order, count in orders.most_common()]
    lines += ["", f"Settings, as `python -m rlstable.train` takes them, after `{' '.join(TASK)}`:", ""]
    lines += [f"- {CASES[case][0]}: `{' '.join(CASES[case][1])}`, {len(own)} seeds" for case, own in by.items()]
    pages.fill(out.parent / "recovery.md", {"results": "\n".join([*lines, "", pages.machine()])})
    _draw(by, out.parent / "recovery.png")


def _draw(by: Mapping[str, Sequence[Row]], path: Path) -> None:
    layout = {"ncols": len(by), "figsize": (2.7 * len(by), 2.8), "sharey": True, "squeeze": False}
    with pages.picture(path, **layout) as (_, panels):
        for axes, (case, rows) in zip(panels[0], by.items(), strict=True):
            for row in rows:
                # A run without a good state has only its last point, because bad states are not evaluated.
                points = [*row["curve"], (row["steps"], row["return"] or 0.0)]
                steps, returns = np.array(points, dtype=float).T / [[1000], [1]]
                end = "o" if row["ending"] == "completed" else "X"
                axes.plot(steps, returns, color="tab:blue", linewidth=1, alpha=0.8)
                axes.plot(steps[-1], returns[-1], end, color="tab:blue" if end == "o" else "tab:red")
                ticks = np.array(row["back_at"]) / 1000
                axes.plot(ticks, [-60] * len(ticks), "|", color="black", markersize=7)
            axes.set_xlim(0, 1.05 * max(row["steps"] for own in by.values() for row in own) / 1000)
            axes.set_title("\n".join(CASES[case][0].split(", ", 1)), fontsize=8)
            pages.plain(axes, "thousand steps")
        panels[0][0].set_ylabel("return, every seed", fontsize=8)


def main(argv: Sequence[str] | None = None) -> None:
    parser = results.study_parser(__doc__, Path("docs/recovery.jsonl"), only=CASES)
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    asked = parser.parse_args(argv)
    brax_rival.keep_compiled_programs()
    for case in () if asked.page else asked.only or CASES:
        run_case(case, asked.seeds, asked.out, [*TASK, *CASES[case][1]])
    write(results.read(asked.out), asked.out)


if __name__ == "__main__":
    main()
