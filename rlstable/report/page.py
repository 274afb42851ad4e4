"""The page about one or several runs, as one HTML file that loads nothing from a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlstable.io.run_folder import return_of
from rlstable.policy.statistics import estimate, interquartile_mean
from rlstable.report.changes import changed_settings
from rlstable.report.chart import LARGE, SMALL, Line, Mark, chart
from rlstable.report.episodes import episodes
from rlstable.report.markup import colour, document, duration, number, swatch, table, text
from rlstable.report.run_record import RunRecord, differences
from rlstable.report.timeline import event_text, lanes, timeline
from rlstable.supervise.run_warnings import LOSS_NOT_FINITE
from rlstable.supervise.stop_reasons import StopReason, command

_LAST_EVENTS = 300
_FIRST = ("Episode length", "Value loss", "Policy distance", "Explained variance", "Entropy", "Throughput")
_SMOOTHING = (
    '<p class="controls"><label>smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" '
    'value="0" autocomplete="off"></label></p>'
)
_NOTHING_FINITE = '<p class="bad">no finite value was logged</p>'
_STEPS_OF_SIGN = 5
_SEED_KEYS = {"seed", "logging.wandb.name", "resume"}  # settings that differ between seeds of one run
_NORMAL_95 = 1.96  # standard errors to each side


class Panel(NamedTuple):
    """A chart of metrics.

    Attributes:
        title: Title of the chart.
        note: Its meaning or unit.
        keys: Metrics by name of the line; the second line is dashed.
        may_be_log: Whether a wide range gets a logarithmic scale.
        band: Metrics of the edges of a band around the first line; None without a band.
    """

    title: str
    note: str
    keys: dict[str, str]
    may_be_log: bool = False
    band: tuple[str, str] | None = None


PANELS = (
    Panel("Return", "mean of evaluations with its 95 % interval; training dashed",
          {"evaluation": "eval/episode_reward", "training": "episode/sum_reward"}),
    Panel("Episode length", "steps", {"evaluation": "eval/avg_episode_length", "training": "episode/length"}),
    Panel("Value loss", "", {"value loss": "training/v_loss"}, True),
    Panel("Policy loss", "", {"policy loss": "training/policy_loss"}),
    Panel("Entropy", "of the policy", {"entropy": "training/entropy"}),
    Panel("Policy distance", "nats per iteration, of actions that the environment gets; 99th percentile dashed",
          {"mean": "training/policy_distance", "99th percentile": "training/policy_distance_p99"}, True),
    Panel("KL divergence", "as in Brax, of the Gaussians before the tanh; huge but harmless if actions are saturated",
          {"KL": "training/kl_mean"}, True),
    Panel("Clip fraction", "share of samples with a clipped ratio", {"clip fraction": "training/clip_fraction"}),
    Panel("Explained variance", "of the returns by the value network; 1 is perfect",
          {"explained variance": "training/explained_variance"}),
    Panel("Policy standard deviation", "mean; band from the least to the greatest",
          {"mean": "training/policy_dist_mean_std"}, True,
          ("training/policy_dist_min_std", "training/policy_dist_max_std")),
    Panel("Gradient norm", "before clipping", {"gradient norm": "training/grad_norm"}, True),
    Panel("Learning rate", "of the policy; the critic's is dashed",
          {"policy": "training/learning_rate", "critic": "training/value_learning_rate"}, True),
    Panel("Throughput", "environment steps per second", {"steps/s": "training/sps"}),
    Panel("Accepted updates", "share; valid samples dashed",
          {"accepted updates": "training/accepted_share", "valid samples": "training/valid_share"}),
    Panel("Memory", "MB of the host; the device's is dashed", {"host": "memory/host_mb", "device": "memory/device_mb"}),
)  # fmt: skip


def page(records: Sequence[RunRecord], refresh: bool = False) -> str:
    """Returns the page of one or more runs as HTML.

    Args:
        records: The runs.
        refresh: Whether the browser loads the page again now and then, because a run is still writing it.
    """
    of_seeds = len(records) > 1 and not differences(records).keys() - _SEED_KEYS
    title = records[0].name if len(records) == 1 else f"{len(records)} {'seeds' if of_seeds else 'runs'}"
    parts = [f"<h1>{text(title)}</h1>", f'<p class="sub">{_subtitle(records)}</p>']
    parts.append(_figure(PANELS[0], records, of_seeds))
    parts.append(_facts(records[0]) if len(records) == 1 else _summary(records))
    parts += [_advice(record) for record in records]
    parts.append(_signs(records))
    parts.append(changed_settings(records))
    if len(records) > 1:
        parts.append(_over_seeds(records) if of_seeds else _differences(records))
    parts.append(episodes(records))
    parts.append(_charts(records, of_seeds))
    parts.append(_timelines(records))
    parts.append(_incidents(records))
    parts.append(_next_commands(records))
    parts += [_about(record, len(records) > 1) for record in records]
    return document(title, parts, refresh)


def _subtitle(records: Sequence[RunRecord]) -> str:
    envs = ", ".join(dict.fromkeys(text(record.settings.get("env.name", "?")) for record in records))
    times = [row["time"] for record in records for row in (*record.rows, *record.events) if "time" in row]
    span = ""
    if times:
        first, last = (datetime.fromtimestamp(moment) for moment in (min(times), max(times)))
        span = f", {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}"
    return f"{envs}{span}"


def _ending(record: RunRecord) -> tuple[str, str, str]:
    """Returns the stop reason of a run, its style and its meaning."""
    if record.result is None:
        return "not ended", "warn", "the run is still running, or was killed"
    name = str(record.result.get("stop_reason"))
    known = StopReason.__members__.get(name)
    style = "good" if known is not None and known.succeeded else "bad"
    if known in (StopReason.interrupted, StopReason.preempted, StopReason.time_limit):
        style = "warn"
    return name, style, "" if known is None else known.meaning


def _steps(record: RunRecord) -> float:
    steps = [row["step"] for row in (*record.rows, *record.events) if isinstance(row.get("step"), int)]
    return float(max(steps, default=0))


def _best(record: RunRecord) -> float | None:
    """Returns the confirmed return, or else the return of the best evaluation."""
    confirmed = _confirmed(record)
    return _best_evaluation(record) if confirmed is None else confirmed


def _confirmed(record: RunRecord) -> float | None:
    result = record.result or {}
    return return_of(result) if result.get("confirmed_return") is not None else None


def _best_evaluation(record: RunRecord) -> float | None:
    values = record.series("eval/episode_reward")[1]
    return float(values.max()) if values.size else None


def _trips(record: RunRecord) -> float:
    return sum(float(record.trips(guard)[1].sum()) for guard in record.guards)


def _facts(record: RunRecord) -> str:
    name, style, meaning = _ending(record)
    trips, rollbacks = _trips(record), record.last("supervise/rollbacks") or 0.0
    value = (record.result or {}).get("unsaved_steps")
    unsaved = value if isinstance(value, int | float) else 0
    facts = [
        ("stop reason", f'<span class="{style}" title="{text(meaning)}">{text(name)}</span>'),
        ("steps", f"{_steps(record):,.0f}"),
        *([("steps not saved", f'<span class="bad">{unsaved:,.0f}</span>')] if unsaved else []),
        ("last return", number(record.last("eval/episode_reward"))),
        ("best evaluation" if _confirmed(record) is None else "confirmed best", number(_best(record))),
        ("training time", duration(record.last("training/walltime"))),
        ("steps per second", number(_median(record, "training/sps"), ",.0f")),
        ("guard trips", _guards_off(record) or f'<span class="{"bad" if trips else "good"}">{trips:,.0f}</span>'),
        ("rollbacks", f'<span class="{"bad" if rollbacks else "good"}">{rollbacks:,.0f}</span>'),
    ]
    names = ", ".join(text(name) for name, _ in record.warnings)
    facts += [("warnings", f'<span class="bad">{names}</span>')] if names else []
    return '<dl class="facts">' + "".join(f"<div><dt>{n}</dt><dd>{v}</dd></div>" for n, v in facts) + "</dl>"


def _guards_off(record: RunRecord) -> str:
    """Returns a remark if the run had no guard, whose number of trips means nothing then."""
    switches = [value for key, value in record.settings.items() if re.fullmatch(r"guards\.\w+\.enabled", key)]
    return '<span class="warn">guards off</span>' if switches and not any(switches) else ""


def _median(record: RunRecord, key: str) -> float | None:
    values = record.series(key)[1]
    return float(np.median(values)) if values.size else None


def _summary(records: Sequence[RunRecord]) -> str:
    head = ["run", "stop reason", "steps", "last return", "best return", "time", "steps/s", "trips", "rollbacks"]
    rows = []
    for index, record in enumerate(records):
        name, style, meaning = _ending(record)
        rows.append(
            [
                f"{swatch(index)}{text(record.name)}",
                f'<span class="{style}" title="{text(meaning)}">{text(name)}</span>',
                f"{_steps(record):,.0f}",
                number(record.last("eval/episode_reward")),
                number(_best(record)),
                duration(record.last("training/walltime")),
                number(_median(record, "training/sps"), ",.0f"),
                f"{_trips(record):,.0f}",
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
        for event in record.of_kind("sign"):
            found.setdefault(str(event.get("sign")), []).append(event)
        name = f"{swatch(index)}{text(record.name)}: " if len(records) > 1 else ""
        for sign, events in found.items():
            steps = ", ".join(f"{event.get('step', 0):,}" for event in events[:_STEPS_OF_SIGN])
            more = f" and {len(events) - _STEPS_OF_SIGN:,} more" if len(events) > _STEPS_OF_SIGN else ""
            more += ", to the end" if sign in record.lasting_signs else ""
            items.append(
                f"<li>{name}<strong>{text(sign)}</strong>, step {steps}{more}: {text(events[-1].get('text'))}</li>"
            )
    return f"<h2>Signs of trouble</h2><ul>{''.join(items)}</ul>" if items else ""


def _over_seeds(records: Sequence[RunRecord]) -> str:
    """Returns the summary of runs that differ only in their seed."""
    best = [value for record in records if (value := _best(record)) is not None]
    if not best:
        return ""
    found = estimate(best, interquartile_mean)
    interval = "" if found.low is None else f", 95 % interval {found.low:,.1f} to {found.high:,.1f}"
    return (
        f"<p>Best return over {len(best)} seeds: interquartile mean <strong>{found.value:,.1f}</strong>{interval}.</p>"
    )


def _differences(records: Sequence[RunRecord]) -> str:
    found = differences(records)
    if not found:
        return "<h2>Differences in the configuration</h2><p>The configurations are equal.</p>"
    head = ["key", *(f"{swatch(index)}{text(record.name)}" for index, record in enumerate(records))]
    rows = [[f"<code>{text(key)}</code>", *(text(value) for value in values)] for key, values in found.items()]
    return "<h2>Differences in the configuration</h2>" + table(head, rows)


def _charts(records: Sequence[RunRecord], of_seeds: bool) -> str:
    """Returns the charts except the return: first what matters most, flat ones and the rest folded away."""
    first: list[str] = []
    rest: list[str] = []
    flat: list[str] = []
    for panel in PANELS[1:]:
        figure = _figure(panel, records, of_seeds)
        if figure:
            (flat if _is_flat(panel, records) else first if panel.title in _FIRST else rest).append(figure)
    if not (first or rest or flat):
        return "<h2>Curves</h2><p>The run logged no metrics.</p>" if not any(record.rows for record in records) else ""
    folded = [("more curves", rest), ("flat curves", flat)]
    details = "".join(
        f"<details><summary>{len(figures)} {name}</summary>{_grid_of(figures)}</details>"
        for name, figures in folded
        if figures
    )
    return f"<h2>Curves</h2>{_SMOOTHING}{_grid_of(first)}{details}"


def _grid_of(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _is_flat(panel: Panel, records: Sequence[RunRecord]) -> bool:
    """Whether every metric of a panel has one value for the whole run."""
    series = [record.series(key)[1] for record in records for key in panel.keys.values()]
    values = [value for value in series if value.size]
    return bool(values) and all(np.ptp(value) == 0.0 for value in values)


def _figure(panel: Panel, records: Sequence[RunRecord], of_seeds: bool) -> str:
    """Returns the chart of a panel with its title and legend; empty if the runs did not log its metrics."""
    lines = [line for index, record in enumerate(records) for line in _lines(panel, record, index, len(records))]
    if not lines and not any(key in row for record in records for row in record.rows for key in panel.keys.values()):
        return ""
    is_return = panel is PANELS[0]
    if of_seeds and lines:
        solid = [line for line in lines if not line.dashed] or lines
        lines = [*(line._replace(thin=True) for line in solid), *_mean_of_seeds(panel, records)]
    marks = _marks(records) if is_return else []
    end = max(_steps(record) for record in records)
    frame = LARGE if is_return else SMALL
    drawn = chart(panel.title, lines, end, panel.may_be_log, frame, marks) if lines else _NOTHING_FINITE
    note = f" <span>{text(panel.note)}</span>" if panel.note else ""
    caption = f"<figcaption>{text(panel.title)}{note}{_legend(lines)}</figcaption>"
    return f'<figure class="card{" large" if is_return else ""}">{caption}{drawn}</figure>'


def _mean_of_seeds(panel: Panel, records: Sequence[RunRecord]) -> list[Line]:
    """Returns the mean over seeds of a panel's first logged metric, with a band from the least to the greatest seed."""
    key = next(key for key in panel.keys.values() if any(record.series(key)[0].size for record in records))
    series = [one for record in records if (one := _in_order(*record.series(key)))[0].size]
    last = min((steps[-1] for steps, _ in series), default=-1.0)
    steps = series[0][0][series[0][0] <= last] if series else np.array([])
    if not steps.size:
        return []
    values = np.stack([np.interp(steps, *one) for one in series])
    return [Line("mean of seeds", steps, values.mean(axis=0), 0, values.min(axis=0), values.max(axis=0))]


def _in_order(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns points in the order of their steps; a rollback repeats steps."""
    order = np.argsort(steps, kind="stable")
    return steps[order], values[order]


def _legend(lines: Sequence[Line]) -> str:
    """Returns the names of the lines with their colours; empty for one line."""
    named = [line for line in lines if not line.thin]
    if len(lines) < 2:
        return ""
    entries = [f'<i class="key b{line.colour}{" dash" * line.dashed}"></i>{text(line.name)}' for line in named]
    entries += ["thin: one seed each"] if len(named) < len(lines) else []
    return f'<span class="legend">{" &ensp; ".join(entries)}</span>'


def _marks(records: Sequence[RunRecord]) -> list[Mark]:
    """Returns the target return, and for a single run its rollbacks and its best evaluation."""
    target = records[0].settings.get("eval.target_return")
    marks = [Mark(f"target {target:,g}", None, float(target))] if isinstance(target, int | float) else []
    if len(records) > 1:
        return marks
    (record,) = records
    marks += [
        Mark(f"step {event.get('step', 0):,}: {event_text(event)}", float(event.get("step", 0)), None, "bad")
        for event in record.of_kind("rolled_back")
    ]
    steps, values = record.series("eval/episode_reward")
    if values.size:
        best = int(values.argmax())
        label = f"best evaluation: {values[best]:,.1f} at step {steps[best]:,.0f}"
        marks.append(Mark(label, float(steps[best]), float(values[best]), "good"))
    return marks


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


def _lines(panel: Panel, record: RunRecord, index: int, runs: int) -> list[Line]:
    lines = []
    for place, (name, key) in enumerate(panel.keys.items()):
        steps, values = record.series(key)
        if not values.size:
            continue
        label = name if runs == 1 else f"{record.name}, {name}"
        line = Line(label, steps, values, colour(index if runs > 1 else place), dashed=place > 0)
        if place == 0 and panel.band is not None:
            line = _with_band(line, *(record.series(edge) for edge in panel.band))
        elif key == "eval/episode_reward":
            line = _with_interval(line, record)
        lines.append(line)
    return lines


def _with_band(line: Line, low: tuple[np.ndarray, np.ndarray], high: tuple[np.ndarray, np.ndarray]) -> Line:
    same = len(low[1]) == len(high[1]) == len(line.y)
    return line._replace(low=low[1], high=high[1]) if same else line


def _with_interval(line: Line, record: RunRecord) -> Line:
    """Adds the 95 % interval of a mean return, from the deviation and the number of episodes that were not aborted."""
    deviation, episodes = record.series("eval/episode_reward_std")[1], record.settings.get("eval.num_envs")
    if len(deviation) != len(line.y) or not isinstance(episodes, int):
        return line
    aborted = dict(zip(*record.series("eval/aborted_share"), strict=True))
    kept = np.array([episodes * (1.0 - aborted.get(step, 0.0)) for step in line.x])
    # One episode has no deviation and no interval.
    half = _NORMAL_95 * deviation / np.sqrt(np.maximum(kept - 1.0, 1.0))
    return line._replace(low=line.y - half, high=line.y + half)


def _timelines(records: Sequence[RunRecord]) -> str:
    end = max(_steps(record) for record in records)
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
