"""A learning rate far too high: which runs end by themselves, which by name, and which find their way back.

python -m scripts.recovery                       # every case, one line per seed as it goes; goes on where it stopped
python -m scripts.recovery --only supervised     # some cases
python -m scripts.recovery --page                # docs/recovery.md and its picture from what was measured

Runs as a user would start them, one after another. A policy is judged as evaluations are, on episodes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rlstable.cli.compose import compose
from rlstable.config import Config, ConfigError
from rlstable.device import sharding
from rlstable.policy import load_policy
from rlstable.policy.evaluator import PolicySnapshot, make_evaluator
from rlstable.ppo.networks import Networks
from rlstable.runner.loop import TrainingLoop
from scripts.recovery import page as recovery_page
from scripts.rivals import brax_rival
from scripts.survival import __main__ as survival
from scripts.survival import page as survival_page

Row = dict[str, Any]

# A thousand times the rate of the task: an exponent lost in typing.
TOO_HIGH = ("ppo.learning_rate=0.3",)
# The same operations as Brax's PPO, and somebody who looks at what comes out: no limiter holds a step back.
WATCHED = (
    "guards=off",
    "guards.finite_state.enabled=true",
    "guards.policy.enabled=true",
    "guards.value_loss.enabled=true",
)
TASK = survival.STEADY
CASES: dict[str, tuple[str, ...]] = {
    "clean": WATCHED,
    "unwatched": (*TOO_HIGH, "guards=off"),
    "unsupervised": (*TOO_HIGH, *WATCHED, "supervise=off"),
    "supervised": (*TOO_HIGH, *WATCHED),
    "limited": (*TOO_HIGH, "guards=default", "supervise=off"),
}
RESULTS = Path("docs/recovery.jsonl")
LOOKS = 20


def worth(config: Config, networks: Networks, params: Any, statistics: Any) -> float | None:
    """The mean return of a policy, always on the same episodes; None where it makes every simulation bad."""
    evaluator = make_evaluator(config, networks, contextlib.nullcontext, print)
    return evaluator.evaluate([PolicySnapshot(params, statistics, jax.random.PRNGKey(0))])[0]["eval/episode_reward"]


def run_seed(case: str, seed: int, overrides: Sequence[str]) -> Row:
    """One run from its beginning to its ending, and what its last and its best policy are worth.

    Args:
        case: Its name.
        seed: Of the run.
        overrides: Its configuration.
    """
    looks = [f"eval.num_evals={LOOKS}", f"eval.num_envs={survival.EPISODES}", "eval.target_return=null"]
    config = compose([*overrides, *looks, "logging=quiet", "devices=1", f"seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        runner = TrainingLoop(config, folder)
        result = runner.run()
        lines = (Path(folder) / "events.jsonl").read_text().splitlines()
        networks, best = runner.single.programs.setup.ppo.networks, None
        with contextlib.suppress(ConfigError):  # nothing was ever worth saving
            policy = load_policy(folder)
            best = worth(config, networks, policy.params, policy.statistics)
    last = worth(config, networks, *sharding.first_device((runner.single.state.params, runner.single.state.normalizer)))
    back = [event for event in map(json.loads, lines) if event["kind"] == "rolled_back"]
    tuning = jax.device_get(runner.single.state.tuning)
    curve = [(row["step"], row["eval/episode_reward"]) for row in result.history if "eval/episode_reward" in row]
    return {
        "case": case, "seed": seed, "ending": result.stop_reason.name, "return": last, "best": best,
        "remedies": [event["remedy"] for event in back], "back_at": [event["step"] for event in back],
        "causes": sorted({event["cause"] for event in back}), "steps": runner.single.host.logged_step,
        "lost_steps": runner.single.host.attempts.lost_steps,
        "rate": float(tuning.learning_rate * tuning.learning_rate_scale),
        "curve": curve, "seconds": round(runner.single.host.elapsed, 1),
    }  # fmt: skip


def run_case(case: str, seeds: int, out: Path, cases: Mapping[str, tuple[str, ...]], task: Sequence[str]) -> None:
    """Runs the seeds of a case that are not in the results yet, and adds them one by one."""
    known = {row["seed"] for row in survival_page.read(out) if row["case"] == case}
    for seed in sorted({*range(seeds)} - known):
        row = run_seed(case, seed, [*task, *cases[case]])
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = [None if row[key] is None else round(row[key]) for key in ("return", "best")]
        back = ", ".join(row["remedies"])
        print(f"{case:13} seed {seed} {row['ending']:18} last, best {shown} rate {row['rate']:.3g} {back}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", metavar="CASE", help="all of them")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    asked = parser.parse_args(arguments)
    if asked.seeds < 1:
        parser.error(f"--seeds: {asked.seeds} is none; 5 is the default")
    brax_rival.keep_compiled_programs()
    for case in () if asked.page else asked.only or CASES:
        run_case(case, asked.seeds, asked.out, CASES, TASK)
    recovery_page.write(survival_page.read(asked.out), CASES, TASK, asked.out)


if __name__ == "__main__":
    main()
