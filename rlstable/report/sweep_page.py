"""The page about a sweep: settings over seeds, parallel coordinates, and all runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlstable.report.markup import document, number, table, text
from rlstable.report.sweep import Job, parallel_coordinates, settings_of


def sweep_page(folder: Path, jobs: Sequence[Job]) -> str:
    """Returns the page of a sweep as HTML."""
    title = f"sweep {folder.name}"
    head = ["setting", "runs", "interquartile mean", "95 % interval", "best", "stop reasons"]
    rows = []
    for setting in settings_of(jobs):
        found = setting.iqm
        scores = [job.score for job in setting.jobs if job.score is not None]
        rows.append(
            [
                " ".join(f"<code>{text(key)}={text(value)}</code>" for key, value in setting.values) or "–",
                f"{len(setting.jobs)}",
                number(None if found is None else found.value),
                "–" if found is None or found.low is None else f"{found.low:,.1f} to {found.high:,.1f}",
                number(max(scores, default=None)),
                text(", ".join(f"{name} {count}" for name, count in setting.stop_reasons.items())),
            ]
        )
    parts = [
        f"<h1>{text(title)}</h1>",
        f'<p class="sub">{len(jobs)} finished runs, {len(rows)} settings; the score of a run is its best return, '
        "confirmed if possible</p>",
        table(head, rows, range(1, 5)),
    ]
    if drawn := parallel_coordinates(jobs):
        parts.append(f'<h2>Settings and returns</h2><figure class="card scroll">{drawn}</figure>')
    jobs_rows = [
        [
            text(job.name),
            " ".join(f"<code>{text(key)}={text(value)}</code>" for key, value in job.values.items()),
            text(job.result.get("stop_reason")),
            f"{job.result.get('step') or 0:,}",
            number(job.score),
        ]
        for job in jobs
    ]
    parts.append(
        "<h2>Runs</h2>" + table(["job", "overrides", "stop reason", "steps", "best return"], jobs_rows, (3, 4))
    )
    return document(title, parts)
