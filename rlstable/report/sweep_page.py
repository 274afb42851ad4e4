"""The page about a sweep: the best setting, learning curves, and all settings with their runs."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rlstable.report.chart import Line, chart, mean_of
from rlstable.report.markup import COLOURS, coloured_ending, document, number, swatch, table, text
from rlstable.report.run_record import RETURN
from rlstable.report.sweep import Job, Setting, Values, counted, interval, settings_of, varied_keys, verdict


def sweep_page(folder: Path, jobs: Sequence[Job], page_folder: Path | None = None) -> str:
    """The page of a sweep as HTML; its links go from `page_folder`, by default the folder of the sweep."""
    settings = settings_of(jobs)
    varied = varied_keys(settings)
    title = f"sweep {folder.absolute().name}"
    ended = sum(job.result is not None for job in jobs)
    still = f", {len(jobs) - ended:,} not ended" if ended < len(jobs) else ""
    envs = dict.fromkeys(str(job.record.settings.get("env.name", "?")) for job in jobs if job.record is not None)
    about = ", ".join([*envs, counted(len(settings), "setting"), counted(len(jobs), "run")]) + still
    swatches = {setting.values: swatch(index) for index, setting in enumerate(settings[:COLOURS])}
    parts = [
        f"<h1>{text(title)}</h1>",
        f'<p class="sub">{text(about)}</p>',
        _best(jobs, settings),
        _curves(settings[:COLOURS], varied, len(settings)),
        _settings(settings, varied, swatches, page_folder or folder),
    ]
    return document(title, parts)


def _best(jobs: Sequence[Job], settings: Sequence[Setting]) -> str:
    sentence, command = verdict(jobs, settings)
    shown = f"<pre>{text(command)}</pre>" if command else ""
    return f'<section class="card best"><p>{text(sentence)}</p>{shown}</section>'


def _curves(drawn: Sequence[Setting], varied: Sequence[str], count: int) -> str:
    lines = []
    for colour, setting in enumerate(drawn):
        found = [job.record.series(RETURN) for job in setting.jobs if job.record is not None]
        seeds = [Line("", steps, values) for steps, values in found if steps.size]
        if seeds:
            lines.append(mean_of(seeds, setting.label(varied) if varied else "mean of seeds", colour))
    if not lines:
        return ""
    note = "mean over seeds; band from the least to the greatest seed; a seed that has ended keeps its last evaluation"
    note += f"; the best {len(drawn)} of {count:,} settings" if len(drawn) < count else ""
    legend = "".join(
        f'<span class="word entry"><i class="key b{line.colour}"></i>{text(line.name)}</span>' for line in lines
    )
    caption = f'<figcaption>Return <span>{note}</span><span class="legend settings">{legend}</span></figcaption>'
    svg = chart("Return", lines, max(float(line.x[-1]) for line in lines), large=True)
    return f'<figure class="card large{" many" * (len(lines) > 4)}" style="margin-top:12px">{caption}{svg}</figure>'


def _settings(
    settings: Sequence[Setting], varied: Sequence[str], swatches: dict[Values, str], page_folder: Path
) -> str:
    head = [*map(text, varied or ["setting"]), "return", "95 % interval", "runs", "trips", "rollbacks"]
    rows = []
    for setting in settings:
        values, records = dict(setting.values), [job.record for job in setting.jobs if job.record is not None]
        names = [text(values.get(key, "–")) for key in varied] or ["all runs"]
        names[0] = swatches.get(setting.values, "") + names[0]
        runs = [
            f'<span class="whole"><a href="{_link(job, page_folder)}">{text(job.name)}</a> '
            f"{coloured_ending(job.result)} {number(job.outcome.value)}</span>"
            for job in setting.jobs
        ]
        row = [
            number(setting.iqm and setting.iqm.value),
            interval(setting.iqm),
            "<br>".join(runs),
            f"{sum(record.trip_count for record in records):,.0f}",
            f"{sum(record.last('supervise/rollbacks') or 0.0 for record in records):,.0f}",
        ]
        rows.append([*names, *row])
    at = len(head)
    return (
        f'<h2>Settings</h2><div class="pinned">{table(head, rows, [*range(1, at - 3), at - 2, at - 1])}</div>'
        '<p class="faint">The return of a run is that of the policy that it hands over, confirmed if possible. The '
        "return of a setting is the interquartile mean over its seeds.</p>"
    )


def _link(job: Job, page_folder: Path) -> str:
    """The address of a run's page, or of its folder without a page."""
    # The seeds of one run also share a page in the folder above.
    pages = [job.folder / "report.html", *([job.folder.parent / "report.html"] if job.seed is not None else [])]
    target = next((page for page in pages if page.is_file()), job.folder)
    return html.escape(quote(os.path.relpath(target, page_folder)))
