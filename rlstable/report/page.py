"""The page about one run or several, in one file that asks nothing of any server."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlstable.io.run_folder import return_of
from rlstable.policy.statistics import estimate, interquartile_mean
from rlstable.report.changes import changed_settings
from rlstable.report.chart import Line, chart
from rlstable.report.markup import colour, document, duration, number, swatch, table, text
from rlstable.report.run_record import RunRecord, differences
from rlstable.report.timeline import timeline, told
from rlstable.supervise.stop_reasons import StopReason, command

_LAST_EVENTS = 300
_STEPS_OF_SIGN = 5
_OF_SEEDS = {"seed", "logging.wandb.name", "resume"}  # settings in which seeds of one run differ
_NORMAL_95 = 1.96  # standard errors to each side


class Panel(NamedTuple):
    """A chart, and what is on it.

    Attributes:
        title: Of the chart.
        note: What it means, or where it should be.
        keys: Metrics by the name of their line; the second one is dashed.
        may_be_log: Whether a wide range is shown on a logarithmic scale.
        band: Metrics of the edges of a band around the first, None for none.
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
    Panel("Policy distance", "in nats, of what the environment sees, over an iteration; 99th percentile dashed",
          {"mean": "training/policy_distance", "99th percentile": "training/policy_distance_p99"}, True),
    Panel("KL divergence", "Brax's, of the Gaussians before the tanh; harmlessly huge where actions are saturated",
          {"KL": "training/kl_mean"}, True),
    Panel("Clip fraction", "share of samples whose ratio was clipped", {"clip fraction": "training/clip_fraction"}),
    Panel("Explained variance", "of returns, by the value network; 1 is perfect",
          {"explained variance": "training/explained_variance"}),
    Panel("Policy standard deviation", "from the least to the greatest", {"mean": "training/policy_dist_mean_std"},
          True, ("training/policy_dist_min_std", "training/policy_dist_max_std")),
    Panel("Gradient norm", "before clipping", {"gradient norm": "training/grad_norm"}, True),
    Panel("Learning rate", "of the policy; of the critic dashed",
          {"policy": "training/learning_rate", "critic": "training/value_learning_rate"}, True),
    Panel("Throughput", "environment steps per second", {"steps/s": "training/sps"}),
    Panel("Accepted updates", "share; valid samples dashed",
          {"accepted updates": "training/accepted_share", "valid samples": "training/valid_share"}),
    Panel("Memory", "MB of the host; of the device dashed", {"host": "memory/host_mb", "device": "memory/device_mb"}),
)  # fmt: skip


def page(stories: Sequence[RunRecord]) -> str:
    """The page of one run or more, as HTML."""
    of_seeds = len(stories) > 1 and not differences(stories).keys() - _OF_SEEDS
    title = stories[0].name if len(stories) == 1 else f"{len(stories)} {'seeds' if of_seeds else 'runs'}"
    parts = [f"<h1>{text(title)}</h1>", f'<p class="sub">{_subtitle(stories)}</p>']
    parts.append(_facts(stories[0]) if len(stories) == 1 else _summary(stories))
    parts += [_advice(story) for story in stories]
    parts.append(_signs(stories))
    parts.append(changed_settings(stories))
    if len(stories) > 1:
        parts.append(_over_seeds(stories) if of_seeds else _differences(stories))
    parts.append(_charts(stories))
    parts.append(_timelines(stories))
    parts.append(_incidents(stories))
    parts += [_about(story, len(stories) > 1) for story in stories]
    return document(title, parts)


def _subtitle(stories: Sequence[RunRecord]) -> str:
    envs = ", ".join(dict.fromkeys(text(story.settings.get("env.name", "?")) for story in stories))
    times = [row["time"] for story in stories for row in (*story.rows, *story.events) if "time" in row]
    span = ""
    if times:
        first, last = (datetime.fromtimestamp(moment) for moment in (min(times), max(times)))
        span = f", {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}"
    return f"{envs}{span}"


def _ending(story: RunRecord) -> tuple[str, str, str]:
    """Name, style and meaning of how a run ended."""
    if story.result is None:
        return "not ended", "warn", "it goes on, or was killed before it could say how it ended"
    name = str(story.result.get("stop_reason"))
    known = StopReason.__members__.get(name)
    style = "good" if known is not None and known.succeeded else "bad"
    if known in (StopReason.interrupted, StopReason.preempted, StopReason.time_limit):
        style = "warn"
    return name, style, "" if known is None else known.meaning


def _steps(story: RunRecord) -> float:
    steps = [row["step"] for row in (*story.rows, *story.events) if isinstance(row.get("step"), int)]
    return float(max(steps, default=0))


def _best(story: RunRecord) -> float | None:
    """The confirmed return, else that of the best single evaluation."""
    confirmed = _confirmed(story)
    return _best_evaluation(story) if confirmed is None else confirmed


def _confirmed(story: RunRecord) -> float | None:
    result = story.result or {}
    return return_of(result) if result.get("confirmed_return") is not None else None


def _best_evaluation(story: RunRecord) -> float | None:
    values = story.series("eval/episode_reward")[1]
    return float(values.max()) if values.size else None


def _trips(story: RunRecord) -> float:
    return sum(float(story.trips(guard)[1].sum()) for guard in story.guards)


def _facts(story: RunRecord) -> str:
    name, style, meaning = _ending(story)
    trips, rollbacks = _trips(story), story.last("supervise/rollbacks") or 0.0
    found = (story.result or {}).get("unsaved_steps")
    unsaved = found if isinstance(found, int | float) else 0
    facts = [
        ("stop reason", f'<span class="{style}" title="{text(meaning)}">{text(name)}</span>'),
        ("steps", f"{_steps(story):,.0f}"),
        *([("steps not saved", f'<span class="bad">{unsaved:,.0f}</span>')] if unsaved else []),
        ("last return", number(story.last("eval/episode_reward"))),
        ("best evaluation", number(_best_evaluation(story))),
        *([("confirmed best", number(_confirmed(story)))] if _confirmed(story) is not None else []),
        ("training time", duration(story.last("training/walltime"))),
        ("steps per second", number(_median(story, "training/sps"), ",.0f")),
        ("guard trips", f'<span class="{"bad" if trips else "good"}">{trips:,.0f}</span>'),
        ("rollbacks", f'<span class="{"bad" if rollbacks else "good"}">{rollbacks:,.0f}</span>'),
    ]
    names = ", ".join(text(name) for name, _ in story.warnings)
    facts += [("warnings", f'<span class="bad">{names}</span>')] if names else []
    return '<dl class="facts">' + "".join(f"<div><dt>{n}</dt><dd>{v}</dd></div>" for n, v in facts) + "</dl>"


def _median(story: RunRecord, key: str) -> float | None:
    values = story.series(key)[1]
    return float(np.median(values)) if values.size else None


def _summary(stories: Sequence[RunRecord]) -> str:
    head = ["run", "stop reason", "steps", "last return", "best return", "time", "steps/s", "trips", "rollbacks"]
    rows = []
    for index, story in enumerate(stories):
        name, style, meaning = _ending(story)
        rows.append(
            [
                f"{swatch(index)}{text(story.name)}",
                f'<span class="{style}" title="{text(meaning)}">{text(name)}</span>',
                f"{_steps(story):,.0f}",
                number(story.last("eval/episode_reward")),
                number(_best(story)),
                duration(story.last("training/walltime")),
                number(_median(story, "training/sps"), ",.0f"),
                f"{_trips(story):,.0f}",
                f"{story.last('supervise/rollbacks') or 0.0:,.0f}",
            ]
        )
    return table(head, rows, range(2, 9))


def _advice(story: RunRecord) -> str:
    notes = []
    if story.result is not None and story.result.get("advice"):
        notes.append(f"<strong>What to do</strong> ({text(story.name)}): {text(story.result['advice'])}")
    notes += [
        f'<span class="bad">{text(name)}</span> ({text(story.name)}): {text(said)}' for name, said in story.warnings
    ]
    errors = [str(event.get("message")) for event in story.of_kind("error")]
    notes += [f'<span class="bad">error</span>: <code>{text(message)}</code>' for message in errors]
    if story.torn:
        notes.append(f"{story.torn} unreadable lines in {text(story.name)} were left out.")
    return "".join(f'<p class="card" style="margin-top:12px">{note}</p>' for note in notes)


def _signs(stories: Sequence[RunRecord]) -> str:
    """The signs of trouble that were said, each once per run with its latest text."""
    items = []
    for index, story in enumerate(stories):
        found: dict[str, list[dict[str, Any]]] = {}
        for event in story.of_kind("sign"):
            found.setdefault(str(event.get("sign")), []).append(event)
        name = f"{swatch(index)}{text(story.name)}: " if len(stories) > 1 else ""
        for sign, events in found.items():
            steps = ", ".join(f"{event.get('step', 0):,}" for event in events[:_STEPS_OF_SIGN])
            more = f" and {len(events) - _STEPS_OF_SIGN:,} more" if len(events) > _STEPS_OF_SIGN else ""
            more += ", to the end" if sign in story.lasting_signs else ""
            items.append(
                f"<li>{name}<strong>{text(sign)}</strong>, step {steps}{more}: {text(events[-1].get('text'))}</li>"
            )
    return f"<h2>Signs of trouble</h2><ul>{''.join(items)}</ul>" if items else ""


def _over_seeds(stories: Sequence[RunRecord]) -> str:
    """Summary of runs that differ in their seed alone."""
    best = [value for story in stories if (value := _best(story)) is not None]
    if not best:
        return ""
    found = estimate(best, interquartile_mean)
    interval = "" if found.low is None else f", 95 % interval {found.low:,.1f} to {found.high:,.1f}"
    return (
        f"<p>Best return over {len(best)} seeds: interquartile mean <strong>{found.value:,.1f}</strong>{interval}.</p>"
    )


def _differences(stories: Sequence[RunRecord]) -> str:
    found = differences(stories)
    if not found:
        return "<h2>Differences in the configuration</h2><p>There are none.</p>"
    head = ["key", *(f"{swatch(index)}{text(story.name)}" for index, story in enumerate(stories))]
    rows = [[f"<code>{text(key)}</code>", *(text(value) for value in values)] for key, values in found.items()]
    return "<h2>Differences in the configuration</h2>" + table(head, rows)


def _charts(stories: Sequence[RunRecord]) -> str:
    end = max(_steps(story) for story in stories)
    figures = []
    for panel in PANELS:
        lines = [line for index, story in enumerate(stories) for line in _lines(panel, story, index, len(stories))]
        if lines:
            note = f" <span>{text(panel.note)}</span>" if panel.note else ""
            drawn = chart(panel.title, lines, end, panel.may_be_log)
            figures.append(f'<figure class="card"><figcaption>{text(panel.title)}{note}</figcaption>{drawn}</figure>')
    if not figures:
        return "<h2>Curves</h2><p>Nothing was logged.</p>"
    return f'<h2>Curves</h2><div class="charts">{"".join(figures)}</div>'


def _lines(panel: Panel, story: RunRecord, index: int, runs: int) -> list[Line]:
    lines = []
    for place, (name, key) in enumerate(panel.keys.items()):
        steps, values = story.series(key)
        if not values.size:
            continue
        label = name if runs == 1 else f"{story.name}, {name}"
        line = Line(label, steps, values, colour(index if runs > 1 else place), dashed=place > 0)
        if place == 0 and panel.band is not None:
            line = _with_band(line, *(story.series(edge) for edge in panel.band))
        elif key == "eval/episode_reward":
            line = _with_interval(line, story)
        lines.append(line)
    return lines


def _with_band(line: Line, low: tuple[np.ndarray, np.ndarray], high: tuple[np.ndarray, np.ndarray]) -> Line:
    same = len(low[1]) == len(high[1]) == len(line.y)
    return line._replace(low=low[1], high=high[1]) if same else line


def _with_interval(line: Line, story: RunRecord) -> Line:
    """The 95 % interval of a mean return, by the deviation and the number of the episodes that were not aborted."""
    deviation, episodes = story.series("eval/episode_reward_std")[1], story.settings.get("eval.num_envs")
    if len(deviation) != len(line.y) or not isinstance(episodes, int):
        return line
    aborted = dict(zip(*story.series("eval/aborted_share"), strict=True))
    kept = np.array([episodes * (1.0 - aborted.get(step, 0.0)) for step in line.x])
    # One episode has no deviation, and no interval.
    half = _NORMAL_95 * deviation / np.sqrt(np.maximum(kept - 1.0, 1.0))
    return line._replace(low=line.y - half, high=line.y + half)


def _timelines(stories: Sequence[RunRecord]) -> str:
    end = max(_steps(story) for story in stories)
    found = []
    for index, story in enumerate(stories):
        drawn = timeline(story, end)
        if drawn:
            name = f"<figcaption>{swatch(index)}{text(story.name)}</figcaption>" if len(stories) > 1 else ""
            found.append(f'<figure class="card scroll" style="margin-bottom:12px">{name}{drawn}</figure>')
    if not found:
        return ""
    return "<h2>What happened</h2>" + "".join(found)


def _incidents(stories: Sequence[RunRecord]) -> str:
    rows = []
    for story in stories:
        for event in story.of_kind("incident"):
            path = _incident(story, Path(str(event.get("path", ""))))
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
    return "<h2>Incidents</h2>" + table(["step", "tripped", "first bad number", "do it again"], rows, [0])


def _incident(story: RunRecord, told: Path) -> Path:
    """The present folder of an incident: the run may have been moved."""
    here = story.folder / "incidents" / told.name
    return here if here.is_dir() else told


def _about(story: RunRecord, named: bool) -> str:
    heading = f"Settings and surroundings of {text(story.name)}" if named else "Settings and surroundings"
    parts = [f"<h2>{heading}</h2>", f"<p>Folder <code>{text(story.folder)}</code></p>"]
    for title, entries in (("device and versions", story.machine), ("configuration", story.settings)):
        if entries:
            rows = [[f"<code>{text(key)}</code>", text(value)] for key, value in entries.items()]
            parts.append(f"<details><summary>{title}</summary>{table(['key', 'value'], rows)}</details>")
    events = story.events[-_LAST_EVENTS:]
    if events:
        rows = [
            [f"{event.get('step', 0):,}", _moment(event.get("time")), f"<code>{text(told(event))}</code>"]
            for event in events
        ]
        cut = (
            f"the last {_LAST_EVENTS:,} of {len(story.events):,} events"
            if len(events) < len(story.events)
            else "events"
        )
        parts.append(f"<details><summary>{cut}</summary>{table(['step', 'time', 'event'], rows, [0])}</details>")
    return "".join(parts)


def _moment(time: Any) -> str:
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}" if isinstance(time, int | float) else "–"
