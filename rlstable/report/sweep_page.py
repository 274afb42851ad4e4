"""The page about a sweep: the best setting, learning curves, all settings over their seeds, and all runs."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlstable.io.outcome import Outcome, outcome_of
from rlstable.report.chart import LARGE, Axis, chart
from rlstable.report.ending import coloured_ending
from rlstable.report.forest import Forest
from rlstable.report.markup import colour, document, number, swatch, table, text
from rlstable.report.parallel_coordinates import parallel_coordinates
from rlstable.report.sweep import Job, Setting, Values, how_sure, interval, settings_of, split_keys
from rlstable.report.sweep_curves import ENDED, NOTE, curves_of

_MOST_CURVES = 8  # as many as there are colours
_FEW_CURVES = 4  # the bands of more curves are paler


def sweep_page(folder: Path, jobs: Sequence[Job], page_folder: Path | None = None) -> str:
    """Returns the page of a sweep as HTML.

    Args:
        folder: Folder of the sweep.
        jobs: Its jobs.
        page_folder: Folder of the page, from which its links go; None for the folder of the sweep.
    """
    settings = settings_of(jobs)
    varied, equal = split_keys(settings)
    title = f"sweep {folder.absolute().name}"
    ended = sum(job.result is not None for job in jobs)
    still = f", {len(jobs) - ended:,} not ended" if ended < len(jobs) else ""
    envs = dict.fromkeys(str(job.record.settings.get("env.name", "?")) for job in jobs if job.record is not None)
    about = ", ".join([*envs, _counted(len(settings), "setting"), _counted(len(jobs), "run")]) + still
    return document(
        title,
        [
            f"<h1>{text(title)}</h1>",
            f'<p class="sub">{text(about)}</p>',
            _best(settings, varied),
            _curves(settings, varied),
            _settings(settings, varied, jobs),
            _equal(settings, equal),
            _parallel(jobs, varied),
            _runs(jobs, settings, varied, page_folder or folder),
        ],
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _best(settings: Sequence[Setting], varied: Sequence[str]) -> str:
    """Returns the best setting with its return, how sure it is, and the command that trains it."""
    best = settings[0] if settings else None
    if best is None or best.iqm is None:
        return '<p class="card">No run has ended with a return yet, so no setting is the best.</p>'
    name = _words(best.label(varied)) if varied else "the only setting"
    without = len(best.jobs) - len(best.scores)
    found = (
        f"95 % interval <strong>{interval(best.iqm)}</strong>" if best.iqm.low is not None else "without an interval"
    )
    notes = [
        f"Return <strong>{number(best.iqm.value)}</strong>, {found}: interquartile mean over "
        f"{_counted(len(best.scores), 'seed')}.",
        text(how_sure(settings, varied)),
        f"Runs without a return do not count: {without:,} of {len(best.jobs):,}." if without else "",
    ]
    return (
        f'<section class="card best"><p class="faint">Best setting</p><p class="name">{name}</p>'
        f"<p>{' '.join(filter(None, notes))}</p><pre>{text(best.command)}</pre></section>"
    )


def _words(label: str) -> str:
    """Returns words that a line break splits only if one is longer than the line."""
    return " ".join(f'<span class="word">{text(word)}</span>' for word in label.split(" "))


def _curves(settings: Sequence[Setting], varied: Sequence[str]) -> str:
    drawn = settings[:_MOST_CURVES]
    lines = curves_of(drawn, varied)
    if not lines:
        return ""
    note = NOTE + (ENDED if any(line.dashed for line in lines) else "")
    if len(drawn) < len(settings):
        note += f"; the best {len(drawn)} of {len(settings):,} settings"
    names = [(index, setting.label(varied)) for index, setting in enumerate(drawn)] if varied else []
    legend = "".join(
        f'<span class="word entry"><i class="key b{colour(index)}"></i>{_words(name)}</span>' for index, name in names
    )
    caption = f'<figcaption>Return <span>{text(note)}</span><span class="legend settings">{legend}</span></figcaption>'
    axis = Axis("environment steps", max(float(line.x[-1]) for line in lines))
    svg = chart("Return", lines, axis, frame=LARGE) + chart("Return", lines, axis)  # the second one for a phone
    many = " many" if len(drawn) > _FEW_CURVES else ""
    return f'<figure class="card large{many}" style="margin-top:12px">{caption}{svg}</figure>'


def _settings(settings: Sequence[Setting], varied: Sequence[str], jobs: Sequence[Job]) -> str:
    """Returns the table of settings, best first."""
    if not settings:
        return ""
    first = next(setting for job in jobs for setting in settings if setting.values == job.setting)
    against_first = len(settings) > 2
    following = dict(zip((setting.values for setting in settings), settings[1:], strict=False))
    forest = Forest([score for setting in settings for score in setting.scores])
    places = {setting.values: index for index, setting in enumerate(settings[:_MOST_CURVES])}

    def value(key: str) -> Callable[[Setting], str]:
        return lambda setting: text(dict(setting.values).get(key, "–"))

    def name(setting: Setting) -> str:
        square = swatch(places[setting.values]) if setting.values in places else ""
        mark = ' <span class="faint">first</span>' if against_first and setting is first else ""
        return f"{square}{value(varied[0])(setting) if varied else 'all runs'}{mark}"

    columns: list[tuple[str, bool, Callable[[Setting], str]]] = [  # head, whether numbers, cell
        (text(varied[0]) if varied else "setting", False, name),
        *((text(key), True, value(key)) for key in varied[1:]),
        ("seeds", True, lambda setting: f"{len(setting.jobs):,}"),
        ("return", True, lambda setting: number(setting.iqm and setting.iqm.value)),
        ("95 % interval", True, lambda setting: (setting.iqm and interval(setting.iqm)) or "–"),
        ("seeds and interval", False, lambda setting: forest.drawn(setting, places.get(setting.values))),
        ("better than next", True, lambda setting: _chance(setting, following.get(setting.values))),
        ("better than first", True, lambda setting: _chance(setting, None if setting is first else first)),
        ("stop reasons", False, _stop_reasons),
        ("trips", True, lambda setting: f"{sum(job.record.trip_count for job in setting.jobs if job.record):,.0f}"),
        ("rollbacks", True, lambda setting: f"{sum(_rollbacks(job) for job in setting.jobs):,.0f}"),
    ]
    columns = [column for column in columns if against_first or column[0] != "better than first"]
    rows = [[cell(setting) for _, _, cell in columns] for setting in settings]
    numbers = [place for place, (_, is_number, _) in enumerate(columns) if is_number]
    return (
        f'<h2>Settings</h2><div class="pinned">{table([head for head, _, _ in columns], rows, numbers)}</div>'
        '<p class="faint">The return of a run is that of the policy that it hands over, confirmed if possible. The '
        "return of a setting is the interquartile mean over its seeds. <em>Better than</em>: the probability that a "
        "seed of this setting returns more than a seed of the other one, with its 95 % interval.</p>"
    )


def _stop_reasons(setting: Setting) -> str:
    return "<br>".join(
        f'<span class="whole">{coloured_ending(jobs[0].result)} {len(jobs):,}</span>'
        for jobs in setting.stop_reasons.values()
    )


def _chance(setting: Setting, other: Setting | None) -> str:
    found = None if other is None else setting.better_than(other)
    return "–" if found is None else f"{found.value:.2f} {interval(found, '.2f')}"


def _rollbacks(job: Job) -> float:
    return 0.0 if job.record is None else job.record.last("supervise/rollbacks") or 0.0


def _equal(settings: Sequence[Setting], equal: Sequence[str]) -> str:
    """Returns the overrides that all settings share, folded."""
    if not equal:
        return ""
    values = dict(settings[0].values)
    rows = [[f"<code>{text(key)}</code>", f"<code>{text(values[key])}</code>"] for key in equal]
    title = f"{_counted(len(equal), 'override')} equal in all runs"
    return f"<details><summary>{title}</summary>{table(['key', 'value'], rows)}</details>"


def _parallel(jobs: Sequence[Job], varied: Sequence[str]) -> str:
    drawn = parallel_coordinates(jobs, varied) if len(varied) > 1 else ""
    return f'<h2>Values and returns</h2><figure class="card scroll">{drawn}</figure>' if drawn else ""


def _runs(jobs: Sequence[Job], settings: Sequence[Setting], varied: Sequence[str], page_folder: Path) -> str:
    swatches: dict[Values | None, str] = {
        setting.values: swatch(index) for index, setting in enumerate(settings[:_MOST_CURVES])
    }
    seeds = any("seed" in job.values for job in jobs)
    keys = [*varied, *(["seed"] if seeds else [])]
    rows = [
        [
            f'<span class="whole">{swatches.get(job.setting, "")}'
            f'<a href="{_link(job, page_folder)}">{text(job.name)}</a></span>',
            *(text(_value(job, key)) for key in keys),
            f'<span class="whole">{coloured_ending(job.result)}</span>',
            f"{_steps(job):,.0f}",
            *map(number, _outcome(job)[:2]),
        ]
        for job in jobs
    ]
    head = ["run", *(text(key) for key in keys), "stop reason", "steps", "return", "best evaluation"]
    at = len(head)
    numbers = [*range(1, len(keys) + 1), *range(at - 3, at)]
    return f'<h2>Runs</h2><div class="pinned">{table(head, rows, numbers)}</div>'


def _value(job: Job, key: str) -> Any:
    """Returns a value of a run's overrides, or of its configuration if its overrides are unknown."""
    if job.overrides is None and job.record is not None:
        return job.record.settings.get(key, "–")
    return job.values.get(key, "–")


def _link(job: Job, page_folder: Path) -> str:
    """Returns the address of a run's page, or of its folder without a page."""
    # The seeds of one run also share a page in the folder above.
    pages = [job.folder / "report.html", *([job.folder.parent / "report.html"] if job.seed is not None else [])]
    target = next((page for page in pages if page.is_file()), job.folder)
    return html.escape(quote(os.path.relpath(target, page_folder)))


def _steps(job: Job) -> float:
    step = (job.result or {}).get("step")
    if isinstance(step, int | float):
        return step
    rows = job.record.rows if job.record is not None else []
    return max((row["step"] for row in rows if "step" in row), default=0)


def _outcome(job: Job) -> Outcome:
    """Returns the outcome of a run, so far if it has not ended."""
    return job.record.outcome if job.result is None and job.record is not None else outcome_of(job.result)
