"""Trains with a learning rate that is far too high, with and without the supervisor.

python -m scripts.recovery                       # all cases, one line per seed; resumes where it stopped
python -m scripts.recovery --only supervised     # some cases
python -m scripts.recovery --page                # docs/recovery.md and its picture from the results

Runs train as a user would start them, one after another. Policies are evaluated on the same episodes.
"""

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
from scripts import arguments, results
from scripts.recovery import page as recovery_page
from scripts.results import Row
from scripts.rivals import brax_rival
from scripts.survival import __main__ as survival

# A thousand times the rate of the task.
TOO_HIGH = ("ppo.learning_rate=0.3",)
# The operations of Brax's PPO and guards that only check results; no limiter bounds a step.
WATCHED = (
    "guards=off", "guards.finite_state.enabled=true", "guards.policy.enabled=true", "guards.value_loss.enabled=true",
)  # fmt: skip
TASK = survival.STEADY
CASES: dict[str, tuple[str, ...]] = {
    "clean": WATCHED,
    "unwatched": (*TOO_HIGH, "guards=off"),
    "unsupervised": (*TOO_HIGH, *WATCHED, "supervise=off"),
    "supervised": (*TOO_HIGH, *WATCHED),
    "limited": (*TOO_HIGH, "guards=default", "supervise=off"),
}
EVALUATIONS = 20


def mean_return(config: Config, networks: Networks, params: Any, statistics: Any) -> float | None:
    """Returns the mean return of a policy on fixed episodes; None if every simulation went bad."""
    evaluator = make_evaluator(config, networks, contextlib.nullcontext, print)
    return evaluator.evaluate([PolicySnapshot(params, statistics, jax.random.PRNGKey(0))])[0]["eval/episode_reward"]


def run_seed(case: str, seed: int, overrides: Sequence[str]) -> Row:
    """Trains one run and evaluates its last and its best policy."""
    evaluations = [f"eval.num_evals={EVALUATIONS}", f"eval.num_envs={survival.EPISODES}", "eval.target_return=null"]
    config = compose([*overrides, *evaluations, "logging=quiet", "devices=1", f"seed={seed}"])
    with tempfile.TemporaryDirectory() as folder:
        loop = TrainingLoop(config, folder)
        result = loop.run()
        lines = (Path(folder) / "events.jsonl").read_text().splitlines()
        run = loop.single
        networks, best = run.programs.setup.ppo.networks, None
        with contextlib.suppress(ConfigError):  # the run saved no policy
            policy = load_policy(folder)
            best = mean_return(config, networks, policy.params, policy.statistics)
    last = mean_return(config, networks, *sharding.first_device((run.state.params, run.state.normalizer)))
    rollbacks = [event for event in map(json.loads, lines) if event["kind"] == "rolled_back"]
    tuning = jax.device_get(run.state.tuning)
    curve = [(row["step"], row["eval/episode_reward"]) for row in result.history if "eval/episode_reward" in row]
    return {
        "case": case, "seed": seed, "ending": result.stop_reason.name, "return": last, "best": best,
        "remedies": [event["remedy"] for event in rollbacks], "back_at": [event["step"] for event in rollbacks],
        "causes": sorted({event["cause"] for event in rollbacks}), "steps": run.host.logged_step,
        "lost_steps": run.host.attempts.lost_steps, "rate": float(tuning.learning_rate * tuning.learning_rate_scale),
        "curve": curve, "seconds": round(run.host.elapsed, 1),
    }  # fmt: skip


def run_case(case: str, seeds: int, out: Path, cases: Mapping[str, tuple[str, ...]], task: Sequence[str]) -> None:
    """Runs the seeds of a case that have no row, and adds their rows one by one."""
    known = {row["seed"] for row in results.matching(results.read(out), case=case)}
    for seed in sorted({*range(seeds)} - known):
        row = run_seed(case, seed, [*task, *cases[case]])
        results.add(out, [row])
        shown = [None if row[key] is None else round(row[key]) for key in ("return", "best")]
        remedies = ", ".join(row["remedies"])
        ended = f"{row['ending']:18} last, best {shown} rate {row['rate']:.3g} {remedies}"
        print(f"{case:13} seed {seed} {ended}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.study_parser(__doc__, Path("docs/recovery.jsonl"))
    arguments.add_choice(parser, "--only", CASES, metavar="CASE")
    parser.add_argument("--seeds", type=arguments.whole(1), default=5, help="default: 5")
    asked = parser.parse_args(argv)
    brax_rival.keep_compiled_programs()
    for case in () if asked.page else asked.only or CASES:
        run_case(case, asked.seeds, asked.out, CASES, TASK)
    recovery_page.write(results.read(asked.out), CASES, TASK, asked.out)


if __name__ == "__main__":
    main()
