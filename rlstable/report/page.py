"""The page about one or several runs, as one HTML file that loads nothing from a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from rlstable.io.printed_commands import command
from rlstable.io.run_folder import seed_folders
from rlstable.policy.statistics import estimate, interquartile_mean
from rlstable.report.markup import code, coloured_ending, document, duration, number, swatch, table, text
from rlstable.report.panels import CONTROLS, PANELS, curves, figure
from rlstable.report.run_record import RunRecord, differences, event_text
from rlstable.supervise.diagnosis import LOSS_NOT_FINITE

_LAST_EVENTS = 300
_STEPS_OF_SIGN = 5
_LINKS = 20  # to recordings of a run; the newest ones
_SEED_KEYS = {"seed", "logging.wandb.name", "resume"}  # settings that differ between seeds of one run


def page(records: Sequence[RunRecord], refresh: bool = False) -> str:
    """The page of one or more runs as HTML.

    `refresh` makes the browser load the page again now and then, because a run is still writing it.
    """
    of_seeds = len(records) > 1 and not differences(records).keys() - _SEED_KEYS
    title = records[0].name if len(records) == 1 else f"{len(records)} {'seeds' if of_seeds else 'runs'}"
    watched = episodes(records, opened=not refresh)
    parts = [
        f"<h1>{text(title)}</h1>",
        f'<p class="sub">{_subtitle(records)}</p>',
        '<p><a href="#episodes">Watch its episodes</a></p>' if watched else "",
        CONTROLS,
        figure(PANELS[0], records, of_seeds),
        _summary(records) if len(records) > 1 else _facts_of_one(records[0]),
        *map(_advice, records),
        watched,
        _listed("Guard trips", records, _trips),
        _listed("Signs of trouble", records, _signs),
        _over_seeds(records) if of_seeds else _differences(records),
        curves(records, of_seeds),
        _incidents(records),
        _next_commands(records),
        *(_about(record, len(records) > 1) for record in records),
    ]
    return document(title, parts, refresh)


def _subtitle(records: Sequence[RunRecord]) -> str:
    envs = ", ".join(dict.fromkeys(text(record.settings.get("env.name", "?")) for record in records))
    times = [row["time"] for record in records for row in (*record.rows, *record.events) if "time" in row]
    if not times:
        return envs
    first, last = (datetime.fromtimestamp(moment) for moment in (min(times), max(times)))
    return f"{envs}, {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}"


def _facts(record: RunRecord) -> dict[str, str]:
    trips, rollbacks = record.trip_count, record.last("supervise/rollbacks") or 0.0
    speeds = record.series("training/sps")[1]
    switches = [value for key, value in record.settings.items() if re.fullmatch(r"guards\.\w+\.enabled", key)]
    guards_off = switches and not any(switches)
    return {
        "stop reason": coloured_ending(record.result),
        "steps": f"{record.steps:,.0f}",
        "return": number(record.outcome.value),
        "best evaluation": number(record.outcome.best),
        "training time": duration(record.last("training/walltime")),
        "steps per second": number(float(np.median(speeds)) if speeds.size else None, ",.0f"),
        "guard trips": '<span class="warn">guards off</span>' if guards_off else _good_if_none(trips),
        "rollbacks": _good_if_none(rollbacks),
    }


def _good_if_none(count: float) -> str:
    return f'<span class="{"bad" if count else "good"}">{count:,.0f}</span>'


def _facts_of_one(record: RunRecord) -> str:
    facts, result = _facts(record), record.result or {}
    unsaved, names = result.get("unsaved_steps"), ", ".join(text(name) for name, _ in record.warnings)
    if isinstance(unsaved, int | float) and unsaved:
        facts["steps not saved"] = _good_if_none(unsaved)
    if names:
        facts["warnings"] = f'<span class="bad">{names}</span>'
    listed = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    policy = record.outcome.policy_text
    # In the words of the console.
    sentence = f"Return: {record.outcome.return_text}." + ("" if policy is None else f" Policy: {policy}.")
    return f'<dl class="facts">{listed}</dl>' + (f"<p>{text(sentence)}</p>" if record.result is not None else "")


def _summary(records: Sequence[RunRecord]) -> str:
    rows = [{"run": _name(index, record), **_facts(record)} for index, record in enumerate(records)]
    return table([*rows[0]], [[*row.values()] for row in rows], range(2, 9))


def _name(index: int, record: RunRecord) -> str:
    return f"{swatch(index)}{text(record.name)}"


def _advice(record: RunRecord) -> str:
    notes = []
    if record.result is not None and record.result.get("advice"):
        notes.append(f"<strong>What to do</strong> ({text(record.name)}): {text(record.result['advice'])}")
    notes += [
        f'<span class="bad">{text(name)}</span> ({text(record.name)}): {text(body)}' for name, body in record.warnings
    ]
    notes += [f'<span class="bad">error</span>: {code(event.get("message"))}' for event in record.of_kind("error")]
    if record.torn:
        notes.append(f"{record.torn} unreadable lines in {text(record.name)} were left out.")
    return "".join(f'<p class="card" style="margin-top:12px">{note}</p>' for note in notes)


def _trips(record: RunRecord) -> Iterator[str]:
    """The trips of each guard, with their first and last step."""
    for guard, (count, first, last) in record.trips().items():
        steps = f"step {first:,.0f}" if first == last else f"steps {first:,.0f} to {last:,.0f}"
        yield f"<strong>{text(guard)}</strong>: {count:,.0f}, {steps}"


def _signs(record: RunRecord) -> Iterator[str]:
    """The signs of trouble, each once with its latest text."""
    told = record.of_kind("sign", "sign_recovered")
    for sign in dict.fromkeys(str(event.get("sign")) for event in told):
        events = [event for event in told if str(event.get("sign")) == sign]
        steps = [f"{event.get('step', 0):,}" for event in events if event["kind"] == "sign"]
        more = f" and {len(steps) - _STEPS_OF_SIGN:,} more" if len(steps) > _STEPS_OF_SIGN else ""
        if events[-1]["kind"] == "sign_recovered":
            more += f", recovered at step {events[-1].get('step', 0):,}"
        elif record.signs.get(sign, {}).get("lasts"):
            more += ", to the end"
        said = record.signs.get(sign, {}).get("text") or events[0].get("text")
        yield f"<strong>{text(sign)}</strong>, step {', '.join(steps[:_STEPS_OF_SIGN])}{more}: {text(said)}"


def _listed(title: str, records: Sequence[RunRecord], lines: Callable[[RunRecord], Iterator[str]]) -> str:
    """A list of lines about each run; empty without a line."""
    items = [
        f"<li>{_name(index, record) + ': ' if len(records) > 1 else ''}{line}</li>"
        for index, record in enumerate(records)
        for line in lines(record)
    ]
    return f"<h2>{title}</h2><ul>{''.join(items)}</ul>" if items else ""


def _over_seeds(records: Sequence[RunRecord]) -> str:
    returns = [value for record in records if (value := record.outcome.value) is not None]
    if not returns:
        return ""
    found = estimate(returns, interquartile_mean)
    interval = "" if found.low is None else f", 95 % interval {found.low:,.1f} to {found.high:,.1f}"
    return f"<p>Return over {len(returns)} seeds: interquartile mean <strong>{found.value:,.1f}</strong>{interval}.</p>"


def _differences(records: Sequence[RunRecord]) -> str:
    if len(records) == 1:
        return ""
    head = ["key", *(_name(index, record) for index, record in enumerate(records))]
    rows = [[code(key), *map(text, values)] for key, values in differences(records).items()]
    return "<h2>Differences in the configuration</h2>" + table(head, rows)


def episodes(records: Sequence[RunRecord], opened: bool = False) -> str:
    """The section about a run, or about the seeds of a run; empty without recordings.

    The newest recording of one run is `opened` or folded away. Links are relative to the run folder, in which the page
    lies by default. Other runs have no common folder.
    """
    folders = [record.folder for record in records]
    base = folders[0] if len(folders) == 1 else folders[0].parent
    if len(folders) > 1 and not set(folders) <= set(seed_folders(base)):
        return ""
    found = [recordings(folder) for folder in folders]
    lists = []
    for index, (record, pages) in enumerate(zip(records, found, strict=True)):
        if pages:
            links = ", ".join(f'<a href="{_address(path, base)}">{_step(path)}</a>' for path in pages[:_LINKS])
            older = f" and {len(pages) - _LINKS:,} older ones" if len(pages) > _LINKS else ""
            name = f"{_name(index, record)}: " if len(records) > 1 else ""
            lists.append(f"<li>{name}{links}{older}</li>")
    if not lists:
        return ""
    newest = _embedded(found[0][0], base, opened) if len(records) == 1 else ""
    return f'<h2 id="episodes">Episodes</h2><ul class="episodes">{"".join(lists)}</ul>{newest}'


def _embedded(recording: Path, base: Path, opened: bool) -> str:
    """A recording inside the page, without access to anything but itself."""
    frame = f'<iframe sandbox="allow-scripts" data-src="{_address(recording, base)}" title="recorded episode"></iframe>'
    # Loaded when it is unfolded: the page of a running run loads itself again and again.
    load = "const frame = this.querySelector('iframe'); if (this.open) frame.src = frame.dataset.src"
    return f'<details {"open " * opened}ontoggle="{load}"><summary>watch {_step(recording)}</summary>{frame}</details>'


def recordings(run_dir: Path) -> list[Path]:
    """Pages of recorded episodes: first the pages of `rlstable render`, then those of training, newest first."""
    pages = (run_dir / "episodes").glob("*.html")
    return sorted(pages, key=lambda path: (not path.stem.isdigit(), int(path.stem) if path.stem.isdigit() else 0))[::-1]


def _address(path: Path, base: Path) -> str:
    return quote(path.relative_to(base).as_posix())


def _step(path: Path) -> str:
    return f"step {int(path.stem):,}" if path.stem.isdigit() else text(path.stem)


def _next_commands(records: Sequence[RunRecord]) -> str:
    """The commands that use the policy of a single run that has ended; none for a ruined policy."""
    record = records[0]
    ruined = LOSS_NOT_FINITE in dict(record.warnings)
    if len(records) > 1 or ruined or record.result is None or not (record.folder / "checkpoints").is_dir():
        return ""
    commands = [command(name, record.folder, "run=") for name in ("evaluate", "render", "export")]
    if record.settings.get("env.source") == "robot":
        commands.append(command("play", record.folder / "export" / "policy.onnx") + " --video walk.mp4")
    commands.append(command("train", record.folder, "resume=") + " total_steps=<more>")
    return f'<h2>Next</h2><pre class="card scroll">{text(chr(10).join(commands))}</pre>'


def _incidents(records: Sequence[RunRecord]) -> str:
    rows = []
    for record in records:
        for event in record.of_kind("incident"):
            recorded, causes = Path(str(event.get("path", ""))), event.get("causes")
            present = record.folder / "incidents" / recorded.name  # the run folder may have been moved
            path = present if present.is_dir() else recorded
            tripped = ", ".join(map(str, causes)) if isinstance(causes, list) else causes
            first = event.get("first", "–")
            rows.append([f"{event.get('step', 0):,}", text(tripped), text(first), code(command("replay", path))])
    return "<h2>Incidents</h2>" + table(["step", "tripped", "first bad number", "replay"], rows, [0]) if rows else ""


def _about(record: RunRecord, named: bool) -> str:
    heading = f"Settings and machine of {text(record.name)}" if named else "Settings and machine"
    parts = [f"<h2>{heading}</h2>", f"<p>Folder {code(record.folder)}</p>"]
    for title, entries in (("device and versions", record.machine), ("configuration", record.settings)):
        if entries:
            rows = [[code(key), text(value)] for key, value in entries.items()]
            parts.append(f"<details><summary>{title}</summary>{table(['key', 'value'], rows)}</details>")
    events = record.events[-_LAST_EVENTS:]
    if events:
        rows = [[f"{event.get('step', 0):,}", _moment(event), code(event_text(event))] for event in events]
        title = f"the last {len(events):,} of {len(record.events):,} events"
        parts.append(f"<details><summary>{title}</summary>{table(['step', 'time', 'event'], rows, [0])}</details>")
    return "".join(parts)


def _moment(event: dict[str, Any]) -> str:
    return f"{datetime.fromtimestamp(event['time']):%Y-%m-%d %H:%M:%S}" if "time" in event else "–"
