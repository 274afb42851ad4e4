"""Stop reasons of a run, with their exit codes, and the lines that a finished run prints."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from rlstable.config import Config
from rlstable.config.overrides import literal
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import seed_of
from rlstable.supervise.run_warnings import LOSS_NOT_FINITE
from rlstable.supervise.signs import recovered_text


class StopReason(Enum):
    """A stop reason with its exit code and its meaning."""

    completed = (0, "all steps were trained")
    target_reached = (0, "the evaluation return reached eval.target_return")
    stopped = (0, "the callback requested it")
    config_error = (2, "the configuration is wrong; nothing was trained")
    state_not_finite = (
        3,
        "parameters, optimizer or observation statistics stayed bad; the last good checkpoint is kept",
    )
    no_update_accepted = (
        4,
        "no update was accepted for guards.finite_update.patience iterations in a row, or in the whole run; the last "
        "good checkpoint is kept",
    )
    physics_unstable = (
        5,
        "more than guards.storm.max_share of the samples stayed bad; the last good checkpoint is kept",
    )
    value_loss_exploded = (
        6,
        "the value error stayed larger than any return of the task; the last good checkpoint is kept",
    )
    policy_diverged = (
        7,
        "the policy stayed outside the bounds of guards.policy; the last good checkpoint is kept",
    )
    policy_collapsed = (
        12,
        "the return fell again and again below the best that was reached; the best state is kept",
    )
    guard_exhausted = (
        8,
        "one of your own guards lost its patience; the last good checkpoint is kept",
    )
    recovery_exhausted = (
        9,
        "all attempts that supervise.recovery allows have failed; the last good checkpoint is kept",
    )
    out_of_memory = (
        10,
        "training needs more memory than available with every memory plan; the last good checkpoint is kept",
    )
    needs_own_program = (
        11,
        "this seed needs a program that the other seeds do not share; the last good checkpoint is kept",
    )
    not_saved = (13, "the last state could not be saved; only older states may be saved")
    time_limit = (75, "supervise.max_wall_time is over; the last iteration was saved, resume to continue")
    error = (1, "the program failed; the traceback was printed")
    interrupted = (130, "stopped by Ctrl-C after an iteration")
    preempted = (143, "stopped by SIGTERM or SIGHUP after an iteration")

    def __init__(self, exit_code: int, meaning: str):
        self.exit_code = exit_code
        self.meaning = meaning

    @classmethod
    def of_guard(cls, name: str) -> StopReason:
        """The stop reason of a run whose state guard `name` has lost its patience."""
        return {
            "finite_state": cls.state_not_finite,
            "storm": cls.physics_unstable,
            "value_loss": cls.value_loss_exploded,
            "policy": cls.policy_diverged,
        }.get(name, cls.guard_exhausted)

    @property
    def succeeded(self) -> bool:
        """Whether the run ended as configured or as requested by the callback."""
        return self.exit_code == 0


_MOST_SIGNS = 3  # in the summary
_WORDS = ("auto", "latest", "null")  # values of a path key with a meaning of their own

# Stop reasons that are not caused by the training.
FROM_OUTSIDE = (StopReason.interrupted, StopReason.preempted, StopReason.time_limit)


# Stop reasons that promise a saved last state. Signals keep their names and exit codes, because job queues read them.
SAVED = (StopReason.completed, StopReason.target_reached, StopReason.stopped, StopReason.time_limit)


def stays_ended(fields: Mapping[str, Any], config: Config) -> bool:
    """Whether a seed of a resumed fleet is not trained further.

    A seed that was given up, by its guards or because it needs another program, can only continue alone.

    Args:
        fields: Fields of the seed's `result.json`.
        config: The present configuration.
    """
    stop_reason = StopReason.__members__.get(str(fields.get("stop_reason")))
    if stop_reason is StopReason.completed:
        return int(fields["step"]) >= config.total_steps
    if stop_reason is StopReason.target_reached:
        target, best = config.eval.target_return, fields.get("best_return")
        return target is not None and best is not None and best >= target
    return stop_reason in GIVEN_UP


def nothing_to_train(reasons: Collection[StopReason], config: Config) -> str:
    """The line of a resumed run that has nothing left to train.

    Args:
        reasons: Stop reasons of its seeds.
        config: The present configuration.
    """
    parts = []
    if StopReason.completed in reasons:
        parts.append(
            f"all steps of total_steps={config.total_steps} are already trained; resume with total_steps=<more>"
        )
    if StopReason.target_reached in reasons:
        target = f"eval.target_return={config.eval.target_return}"
        parts.append(f"{target} is already reached; resume with eval.target_return=<more> or null")
    if any(reason in GIVEN_UP for reason in reasons):
        parts.append("a seed that was given up can only be resumed alone")
    return f"nothing to train: {', and '.join(parts)}"


GIVEN_UP = (
    StopReason.state_not_finite,
    StopReason.no_update_accepted,
    StopReason.physics_unstable,
    StopReason.value_loss_exploded,
    StopReason.policy_diverged,
    StopReason.policy_collapsed,
    StopReason.guard_exhausted,
    StopReason.recovery_exhausted,
    StopReason.needs_own_program,
)


def describe(
    stop_reason: StopReason,
    fields: Mapping[str, Any],
    run_dir: Path,
    policy: Path | None,
    env_by_name: bool = True,
) -> list[tuple[str, str]]:
    """The lines that a finished run prints, as names and values.

    Args:
        stop_reason: Why the run stopped.
        fields: Fields of `result.json`: `step`, `seconds` and the fields that `outcome_of` reads; `wall_seconds` of
            this process; `unsaved_steps`, `advice`, `signs` and `warnings` if there are any; `seeds` with the fields of
            each of several seeds.
        run_dir: The run folder.
        policy: Folder of the policy, with several seeds of the best seed; None if nothing was saved.
        env_by_name: Whether the commands can load the environment; they cannot load an environment object.
    """
    folder, seeds = short_path(run_dir), fields.get("seeds", {})
    ruined = [warning for warning in fields.get("warnings", []) if warning["name"] == LOSS_NOT_FINITE]
    rows = [
        ("stop reason", f"{stop_reason.name}: {stop_reason.meaning}"),
        *([("what to do", fields["advice"])] if "advice" in fields else []),
        *([("not saved", f"the last {fields['unsaved_steps']:,} steps")] if "unsaved_steps" in fields else []),
        *((f"seed {seed}", _of_seed(seed_fields)) for seed, seed_fields in seeds.items()),
        *_of_signs(fields, seeds),
        ("steps", f"{fields['step']:,}" + (" each" if seeds else "")),
        ("return", "interquartile mean " * bool(seeds) + outcome_of(fields).return_text),
        *_of_policy(fields, policy),
        _time(fields),
        ("run folder", folder),
        *([("report", short_path(run_dir / "report.html"))] if (run_dir / "report.html").is_file() else []),
    ]
    if policy is not None and len(ruined) < max(len(seeds), 1):
        reasons = {seed_fields["stop_reason"] for seed_fields in seeds.values()} or {stop_reason.name}
        ended = {StopReason.completed.name, *(reason.name for reason in GIVEN_UP if seeds)}
        # A completed run can only continue with more steps.
        more = f" total_steps={2 * fields['step']}" if reasons <= ended else ""
        more += " eval.target_return=null" if StopReason.target_reached.name in reasons else ""
        if env_by_name:
            rows.append(("resume", f"{command('train', run_dir, 'resume=')}{more}"))
            rows.append(("evaluate", command("evaluate", policy, "run=")))
            rows.append(("render", command("render", policy, "run=")))
        rows.append(("load", f"rlstable.load_policy({json.dumps(short_path(policy), ensure_ascii=False)}).act(obs)"))
    return rows


def _of_policy(fields: Mapping[str, Any], policy: Path | None) -> list[tuple[str, str]]:
    """The line about the policy that the run hands over, with several seeds the policy of the best seed."""
    seeds = {str(seed): seed_fields for seed, seed_fields in fields.get("seeds", {}).items()}
    best = "" if policy is None or not seeds else str(seed_of(policy))
    text = outcome_of(seeds.get(best, fields)).policy_text
    return [] if policy is None or text is None else [("policy", f"seed {best}, " * bool(best) + text)]


def _time(fields: Mapping[str, Any]) -> tuple[str, str]:
    """The line about the time: of this process by its parts if known, else of training only."""
    training, wall = float(fields["seconds"]), fields.get("wall_seconds")
    if wall is None:
        return "training time", f"{training:,.1f} s"
    rest = wall["total"] - wall["training"] - wall["evaluation"]
    parts = f"training {wall['training']:,.1f} s, evaluation {wall['evaluation']:,.1f} s, start and end {rest:,.1f} s"
    resumed = training - wall["training"] > 1.0
    return "wall time", f"{wall['total']:,.1f} s: {parts}" + resumed * f"; training of all processes {training:,.1f} s"


def _of_seed(fields: Mapping[str, Any]) -> str:
    advice = f". {fields['advice']}" if "advice" in fields else ""
    return f"{fields['stop_reason']}, return {outcome_of(fields).return_text}{advice}"


def _of_signs(fields: Mapping[str, Any], seeds: Mapping[Any, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A line per sign of trouble, at most `_MOST_SIGNS`, signs that are over last; several seeds share a line."""
    by_name: dict[tuple[bool, str], list[tuple[Any, Mapping[str, Any]]]] = {}
    for seed, seed_fields in seeds.items() or [(None, fields)]:
        for name, sign in seed_fields.get("signs", {}).items():
            by_name.setdefault((bool(sign.get("recovered_step")), name), []).append((seed, sign))
    rows = []
    for _, logged in sorted(by_name.items(), key=lambda pair: pair[0][0])[:_MOST_SIGNS]:
        names = [str(seed) for seed, _ in logged if seed is not None]
        rows.append(("sign", _seed_prefix(names) + logged[0][1]["text"] + recovered_text(logged[0][1], "; ")))
    if len(by_name) > _MOST_SIGNS:
        rows.append(("signs", f"and {len(by_name) - _MOST_SIGNS:,} more in the report"))
    return rows


def describe_warnings(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The last lines that a finished run prints: one per warning; the same warning of several seeds is one line.

    Args:
        fields: Fields as for `describe`.
    """
    by_name: dict[str, list[tuple[str, str]]] = {}
    for seed, seed_fields in fields.get("seeds", {}).items() or [("", fields)]:
        for warning in seed_fields.get("warnings", []):
            by_name.setdefault(warning["name"], []).append((str(seed), warning["text"]))
    return [
        ("warning", _seed_prefix([seed for seed, _ in logged if seed]) + f"{name}: {logged[0][1]}")
        for name, logged in by_name.items()
    ]


def _seed_prefix(seeds: list[str]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}: " * bool(seeds)


def command(name: str, path: Path, key: str = "") -> str:
    """The command line for a command of rlstable, as a user types it in a shell.

    Args:
        name: Name of the command.
        path: Path that the command gets, relative to the working folder if possible.
        key: Text before the path, such as `run=`.
    """
    shown = short_path(path)
    if shown.startswith("-") or shown in _WORDS:
        shown = str(path.absolute())
    if name == "train":
        shown = literal(shown)  # only `train` reads Hydra's grammar; the other commands take a path literally
    return f"{shlex.quote(_python())} -m rlstable.{name} {shlex.quote(key + shown)}"


def train_command(overrides: Sequence[str]) -> str:
    """The command line that trains with these overrides, as a user types it in a shell.

    Args:
        overrides: Overrides as Hydra read them, such as `overrides` in `result.json`.
    """
    return shlex.join([_python(), "-m", "rlstable.train", *overrides])


def short_path(path: Path) -> str:
    """The path from the working folder, if the path is in it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _python() -> str:
    """The path of this Python from the working folder, or `python` if that starts the same Python."""
    python = shutil.which("python")
    if python is not None and Path(python).absolute() == Path(sys.executable).absolute():
        return "python"
    return short_path(Path(sys.executable).absolute())
