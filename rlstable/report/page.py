"""The page about one or several runs, as one HTML file that loads nothing from a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.policy.statistics import estimate, interquartile_mean
from rlstable.report.changes import changed_settings
from rlstable.report.ending import coloured_ending
from rlstable.report.episodes import episodes
from rlstable.report.markup import document, duration, number, swatch, table, text
from rlstable.report.panels import CONTROLS, PANELS, curves, figure
from rlstable.report.run_record import RunRecord, differences
from rlstable.report.timeline import event_text, lanes, timeline
from rlstable.supervise.run_warnings import LOSS_NOT_FINITE
from rlstable.supervise.stop_reasons import command

_LAST_EVENTS = 300
_STEPS_OF_SIGN = 5
_SEED_KEYS = {"seed", "logging.wandb.name", "resume"}  # settings that differ between seeds of one run


def page(records: Sequence[RunRecord], refresh: bool = False) -> str:
    """Returns the page of one or more runs as HTML.

    Args:
        records: The runs.
        refresh: Whether the browser loads the page again now and then, because a run is still writing it.
    """
    of_seeds = len(records) > 1 and not differences(records).keys() - _SEED_KEYS
    title = records[0].name if len(records) == 1 else f"{len(records)} {'seeds' if of_seeds else 'runs'}"
    parts = [f"<h1>{text(title)}</h1>", f'<p class="sub">{_subtitle(records)}</p>']
    parts += [CONTROLS, figure(PANELS[0], records, of_seeds)]
    parts.append(_facts(records[0]) if len(records) == 1 else _summary(records))
    parts += [_advice(record) for record in records]
    parts.append(_signs(records))
    parts.append(changed_settings(records))
    if len(records) > 1:
        parts.append(_over_seeds(records) if of_seeds else _differences(records))
    parts.append(episodes(records))
    parts.append(curves(records, of_seeds))
    parts.append(_timelines(records))
    parts.append(_incidents(records))
    parts.append(_next_commands(records))
    parts += [_about(record, len(records) > 1) for record in records]
    return document(title, parts, refresh)


def _subtitle(records: Sequence[RunRecord]) -> str:
    envs = ", ".join(dict.fromkeys(text(record.settings.get("env.name", "?")) for record in records))
    times = np.concatenate([record.moments for record in records])
    span = ""
    if times.size:
        first, last = (datetime.fromtimestamp(moment) for moment in (times.min(), times.max()))
        span = f", {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}"
    return f"{envs}{span}"


def _facts(record: RunRecord) -> str:
    trips, rollbacks = record.trip_count, record.last("supervise/rollbacks") or 0.0
    value = (record.result or {}).get("unsaved_steps")
    unsaved = value if isinstance(value, int | float) else 0
    facts = [
        ("stop reason", coloured_ending(record.result)),
        ("steps", f"{record.steps:,.0f}"),
        *([("steps not saved", f'<span class="bad">{unsaved:,.0f}</span>')] if unsaved else []),
        ("return" if record.result is not None else "last return", number(record.outcome.value)),
        ("best evaluation", number(record.outcome.best)),
        ("training time", duration(record.last("training/walltime"))),
        ("steps per second", number(_median(record, "training/sps"), ",.0f")),
        ("guard trips", _guards_off(record) or f'<span class="{"bad" if trips else "good"}">{trips:,.0f}</span>'),
        ("rollbacks", f'<span class="{"bad" if rollbacks else "good"}">{rollbacks:,.0f}</span>'),
    ]
    names = ", ".join(text(name) for name, _ in record.warnings)
    facts += [("warnings", f'<span class="bad">{names}</span>')] if names else []
    listed = "".join(f"<div><dt>{n}</dt><dd>{v}</dd></div>" for n, v in facts)
    return f'<dl class="facts">{listed}</dl>{_handed_over(record)}'


def _handed_over(record: RunRecord) -> str:
    """Returns the return and the policy that a run hands over, in the words of the console."""
    if record.result is None:
        return ""
    policy = record.outcome.policy_text
    sentence = "" if policy is None else f" Policy: {policy}."
    return f"<p>Return: {text(record.outcome.return_text + '.' + sentence)}</p>"


def _guards_off(record: RunRecord) -> str:
    """Returns a remark if the run had no guard, whose number of trips means nothing then."""
    switches = [value for key, value in record.settings.items() if re.fullmatch(r"guards\.\w+\.enabled", key)]
    return '<span class="warn">guards off</span>' if switches and not any(switches) else ""


def _median(record: RunRecord, key: str) -> float | None:
    values = record.series(key)[1]
    return float(np.median(values)) if values.size else None


def _summary(records: Sequence[RunRecord]) -> str:
    head = ["run", "stop reason", "steps", "return", "best evaluation", "time", "steps/s", "trips", "rollbacks"]
    rows = []
    for index, record in enumerate(records):
        rows.append(
            [
                f"{swatch(index)}{text(record.name)}",
                coloured_ending(record.result),
                f"{record.steps:,.0f}",
                number(record.outcome.value),
                number(record.outcome.best),
                duration(record.last("training/walltime")),
                number(_median(record, "training/sps"), ",.0f"),
                f"{record.trip_count:,.0f}",
                f"{record.last('supervise/rollbacks') or 0.0:,.0f}",
            ]
        )
    return table(head, rows, range(2, 9))


def _advice(record: RunRecord) -> str:
    notes = []
    if record.result is not None and record.result.get("advice"):
        notes.append(f"<strong>What to do</strong> ({text(record.name)}): {text(record.result['advice'])}")
    notes += [
        f'<span class="bad">{text(name)}</span> ({text(record.name)}): {text(body)}' for name, body in record.warnings
    ]
    errors = [str(event.get("message")) for event in record.of_kind("error")]
    notes += [f'<span class="bad">error</span>: <code>{text(message)}</code>' for message in errors]
    if record.torn:
        notes.append(f"{record.torn} unreadable lines in {text(record.name)} were left out.")
    return "".join(f'<p class="card" style="margin-top:12px">{note}</p>' for note in notes)


def _signs(records: Sequence[RunRecord]) -> str:
    """Returns the signs of trouble, each once per run with its latest text."""
    items = []
    for index, record in enumerate(records):
        found: dict[str, list[dict[str, Any]]] = {}
        recovered: dict[str, Any] = {}  # step by sign that is over
        for event in record.of_kind("sign", "sign_recovered"):
            name = str(event.get("sign"))
            if event["kind"] == "sign":
                found.setdefault(name, []).append(event)
                recovered.pop(name, None)
            else:
                recovered[name] = event.get("step", 0)
        prefix = f"{swatch(index)}{text(record.name)}: " if len(records) > 1 else ""
        for sign, events in found.items():
            steps = ", ".join(f"{event.get('step', 0):,}" for event in events[:_STEPS_OF_SIGN])
            more = f" and {len(events) - _STEPS_OF_SIGN:,} more" if len(events) > _STEPS_OF_SIGN else ""
            if sign in recovered:
                more += f", recovered at step {recovered[sign]:,}"
            elif record.signs.get(sign, {}).get("lasts"):
                more += ", to the end"
            latest = record.signs.get(sign, events[-1]).get("text")
            items.append(f"<li>{prefix}<strong>{text(sign)}</strong>, step {steps}{more}: {text(latest)}</li>")
    return f"<h2>Signs of trouble</h2><ul>{''.join(items)}</ul>" if items else ""


def _over_seeds(records: Sequence[RunRecord]) -> str:
    """Returns the summary of runs that differ only in their seed."""
    returns = [value for record in records if (value := record.outcome.value) is not None]
    if not returns:
        return ""
    found = estimate(returns, interquartile_mean)
    interval = "" if found.low is None else f", 95 % interval {found.low:,.1f} to {found.high:,.1f}"
    return f"<p>Return over {len(returns)} seeds: interquartile mean <strong>{found.value:,.1f}</strong>{interval}.</p>"


def _differences(records: Sequence[RunRecord]) -> str:
    found = differences(records)
    if not found:
        return "<h2>Differences in the configuration</h2><p>The configurations are equal.</p>"
    head = ["key", *(f"{swatch(index)}{text(record.name)}" for index, record in enumerate(records))]
    rows = [[f"<code>{text(key)}</code>", *(text(value) for value in values)] for key, values in found.items()]
    return "<h2>Differences in the configuration</h2>" + table(head, rows)


def _next_commands(records: Sequence[RunRecord]) -> str:
    """Returns the commands that use the policy of a single run that has ended; none for a ruined policy."""
    if len(records) > 1 or records[0].result is None or not (records[0].folder / "checkpoints").is_dir():
        return ""
    (record,) = records
    if LOSS_NOT_FINITE in dict(record.warnings):
        return ""
    commands = [command(name, record.folder, "run=") for name in ("evaluate", "render", "export")]
    commands.append(command("train", record.folder, "resume=") + " total_steps=<more>")
    return f'<h2>Next</h2><pre class="card scroll">{text(chr(10).join(commands))}</pre>'


def _timelines(records: Sequence[RunRecord]) -> str:
    end = max(record.steps for record in records)
    found = []
    for index, record in enumerate(records):
        if lanes(record).keys() <= {"starts and ends"}:
            continue
        drawn = timeline(record, end)
        if drawn:
            name = f"<figcaption>{swatch(index)}{text(record.name)}</figcaption>" if len(records) > 1 else ""
            found.append(f'<figure class="card scroll" style="margin-bottom:12px">{name}{drawn}</figure>')
    if not found:
        return ""
    return "<h2>What happened</h2>" + "".join(found)


def _incidents(records: Sequence[RunRecord]) -> str:
    rows = []
    for record in records:
        for event in record.of_kind("incident"):
            path = _incident(record, Path(str(event.get("path", ""))))
            causes = event.get("causes")
            rows.append(
                [
                    f"{event.get('step', 0):,}",
                    text(", ".join(map(str, causes)) if isinstance(causes, list) else causes),
                    text(event.get("first", "–")),
                    f"<code>{text(command('replay', path))}</code>",
                ]
            )
    if not rows:
        return ""
    return "<h2>Incidents</h2>" + table(["step", "tripped", "first bad number", "replay"], rows, [0])


def _incident(record: RunRecord, recorded: Path) -> Path:
    """Returns the present folder of an incident, because the run folder may have been moved."""
    present = record.folder / "incidents" / recorded.name
    return present if present.is_dir() else recorded


def _about(record: RunRecord, named: bool) -> str:
    heading = f"Settings and machine of {text(record.name)}" if named else "Settings and machine"
    parts = [f"<h2>{heading}</h2>", f"<p>Folder <code>{text(record.folder)}</code></p>"]
    for title, entries in (("device and versions", record.machine), ("configuration", record.settings)):
        if entries:
            rows = [[f"<code>{text(key)}</code>", text(value)] for key, value in entries.items()]
            parts.append(f"<details><summary>{title}</summary>{table(['key', 'value'], rows)}</details>")
    events = record.events[-_LAST_EVENTS:]
    if events:
        rows = [
            [f"{event.get('step', 0):,}", _moment(event.get("time")), f"<code>{text(event_text(event))}</code>"]
            for event in events
        ]
        cut = (
            f"the last {_LAST_EVENTS:,} of {len(record.events):,} events"
            if len(events) < len(record.events)
            else "events"
        )
        parts.append(f"<details><summary>{cut}</summary>{table(['step', 'time', 'event'], rows, [0])}</details>")
    return "".join(parts)


def _moment(time: Any) -> str:
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}" if isinstance(time, int | float) else "–"
