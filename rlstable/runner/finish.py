"""Writes `result.json` and `report.html` and prints the summary when a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstable.io.console import Console
from rlstable.io.files import write_atomically
from rlstable.io.run_folder import (
    best_seed,
    free_reserve,
    has_checkpoint,
    seed_folder,
    seed_folders,
    write_result,
)
from rlstable.report.page import page
from rlstable.report.run_record import read_record, read_records
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
