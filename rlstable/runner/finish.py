"""Writes `result.json` and `report.html` and prints the summary when a run ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.config import Config
from rlstable.io.console import Console
from rlstable.io.files import write_atomically
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import (
    best_seed,
    free_reserve,
    has_checkpoint,
    seed_folder,
    seed_folders,
    write_result,
)
from rlstable.policy.statistics import interquartile_mean
from rlstable.report.page import page
from rlstable.report.run_record import read_record, read_records
from rlstable.runner.result import Result
from rlstable.runner.summary import describe, describe_warnings
from rlstable.supervise.stop_reasons import GIVEN_UP, StopReason, command


def finish_files(
    stop_reason: StopReason,
    fields: Mapping[str, Any],
    run_dir: Path,
    console: Console,
    *,
    report: bool,
    saved: bool,
    gone: bool = False,
    env_by_name: bool = True,
) -> None:
    """Writes `result.json` and the report page and prints the summary. A file that cannot be written is only reported.

    Args:
        stop_reason: Why the run stopped.
        fields: Fields of `result.json`, see `stop_reasons.describe`.
        run_dir: The run folder.
        console: The console.
        report: Whether to write the report page.
        saved: Whether there is a checkpoint.
        gone: Whether the folder was deleted, moved or replaced, so that nothing is written there.
        env_by_name: Whether the commands can load the environment, see `stop_reasons.describe`.
    """
    try:
        if not gone:
            free_reserve(run_dir)
            write_result(run_dir, fields)
    except OSError as error:
        console.message(f"result.json could not be written: {error}")
    if report and not gone:
        try:
            with console.busy("writing report.html"):
                records = read_records(run_dir) if "seeds" in fields else [read_record(run_dir)]
                write_atomically(run_dir / "report.html", page(records))
        except Exception as error:
            console.message(f"report.html could not be written: {type(error).__name__}: {error}")
    seeds = fields.get("seeds")
    policy = run_dir
    if seeds is not None:
        saved_seeds = [folder for folder in seed_folders(run_dir) if has_checkpoint(folder)]
        policy = best_seed(run_dir) or next(iter(saved_seeds), run_dir)
    rows = describe(stop_reason, fields, run_dir, policy if saved else None, env_by_name)
    for seed, seed_fields in (seeds or {}).items():
        folder = seed_folder(run_dir, seed)
        seed_reason = StopReason[seed_fields["stop_reason"]]
        if seed_reason in GIVEN_UP and seed_reason is not StopReason.needs_own_program and has_checkpoint(folder):
            rows.append((f"seed {seed} alone", command("train", folder, "resume=")))
    console.summary(rows + describe_warnings(fields))


def finish_seeds(
    seeds: Mapping[int, Mapping[str, Any]],
    results: list[Result],
    stop_reason: StopReason | None,
    advice: str | None,
    config: Config,
    run_dir: Path,
    console: Console,
) -> Result:
    """Writes `result.json` and the page of several seeds in the folder above theirs, and prints the summary.

    Args:
        seeds: Fields of `result.json` of each seed.
        results: Results of the seeds.
        stop_reason: Stop reason of the whole run; None if each seed has its own.
        advice: Advice on the stop reason; None if there is none.
        config: The configuration of the whole run.
        run_dir: The folder above the folders of the seeds.
        console: The console.
    """
    fields = fields_of(seeds, stop_reason) | ({} if advice is None else {"advice": advice})
    stop_reason = StopReason[fields["stop_reason"]]
    saved = any(map(has_checkpoint, seed_folders(run_dir)))
    by_name, report = config.env.source != "object", config.logging.report
    gone = not run_dir.is_dir()
    finish_files(stop_reason, fields, run_dir, console, report=report, saved=saved, gone=gone, env_by_name=by_name)
    return Result(stop_reason, run_dir, fields["step"], {}, [], tuple(results), fields["return"])


def fields_of(seeds: Mapping[int, Mapping[str, Any]], stop_reason: StopReason | None = None) -> dict[str, Any]:
    """Fields of `result.json` of several seeds: the worst stop reason, interquartile means of returns."""
    each = list(seeds.values())
    worst = StopReason[max(each, key=lambda fields: int(fields["exit_code"]))["stop_reason"]] if each else None
    reason = stop_reason or worst or StopReason.error
    scored = [fields for fields in each if fields["best_return"] is not None]
    confirmed = [fields["confirmed_return"] for fields in scored if "confirmed_return" in fields]
    return {
        "stop_reason": reason.name,
        "exit_code": reason.exit_code,
        "step": max((fields["step"] for fields in each), default=0),
        "return": _iqm(outcome_of(fields).value for fields in each),
        "best_return": _iqm(fields["best_return"] for fields in each),
        "last_return": _iqm(fields["last_return"] for fields in each),
        **({"confirmed_return": _iqm(confirmed)} if confirmed and len(confirmed) == len(scored) else {}),
        "seconds": max((fields["seconds"] for fields in each), default=0.0),
        "rollbacks": sum(fields["rollbacks"] for fields in each),
        "warnings": [warning | {"seed": seed} for seed in sorted(seeds) for warning in seeds[seed]["warnings"]],
        "seeds": {seed: seeds[seed] for seed in sorted(seeds)},
    }


def _iqm(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(interquartile_mean(np.array(known))) if known else None
