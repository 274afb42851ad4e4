"""The lines that a finished run prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import seed_of
from rlstable.supervise.diagnosis import LOSS_NOT_FINITE, recovered_text
from rlstable.supervise.stop_reasons import GIVEN_UP, StopReason, command, short_path

_MOST_SIGNS = 3


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
