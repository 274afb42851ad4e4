"""Charts of metrics over environment steps and over time: their metrics, lines, bands, marks and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlstable.report.chart import LARGE, SMALL, UNITS, Axis, Line, Mark, chart
from rlstable.report.markup import colour, text
from rlstable.report.run_record import RunRecord
from rlstable.report.timeline import event_text

# The input `clock` shows the charts over time instead of steps, by the style sheet alone.
CONTROLS = (
    '<p class="controls"><label>smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" '
    'value="0" autocomplete="off"></label><label><input id="clock" type="checkbox" autocomplete="off"> '
    "wall-clock axis</label></p>"
)
_FIRST = ("Episode length", "Value loss", "Policy distance", "Explained variance", "Entropy", "Throughput")
_NOTHING_FINITE = '<p class="bad">no finite value was logged</p>'
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


def curves(records: Sequence[RunRecord], of_seeds: bool) -> str:
    """Returns the charts except the return: first what matters most, flat ones and the rest folded away.

    Args:
        records: The runs.
        of_seeds: Whether the runs differ only in their seed.
    """
    first: list[str] = []
    rest: list[str] = []
    flat: list[str] = []
    for panel in PANELS[1:]:
        chart_of_panel = figure(panel, records, of_seeds)
        if chart_of_panel:
            (flat if _is_flat(panel, records) else first if panel.title in _FIRST else rest).append(chart_of_panel)
    if not (first or rest or flat):
        return "<h2>Curves</h2><p>The run logged no metrics.</p>" if not any(record.rows for record in records) else ""
    folded = [("more", rest), ("flat", flat)]
    details = "".join(
        f"<details><summary>{len(drawn)} {name} curve{'s' * (len(drawn) > 1)}</summary>{_grid_of(drawn)}</details>"
        for name, drawn in folded
        if drawn
    )
    return f"<h2>Curves</h2>{_grid_of(first)}{details}"


def figure(panel: Panel, records: Sequence[RunRecord], of_seeds: bool) -> str:
    """Returns the chart of a panel, over steps and over time, with its title and legend.

    Args:
        panel: The panel; the first of `PANELS` is large and has marks.
        records: The runs.
        of_seeds: Whether the runs differ only in their seed, so that their mean is drawn.

    Returns:
        The figure as HTML; empty if the runs did not log its metrics.
    """
    if not any(key in row for record in records for row in record.rows for key in panel.keys.values()):
        return ""
    is_return = panel is PANELS[0]
    drawn, legend = "", ""
    for axis in axes(records):
        lines = _lines_of(panel, records, axis, of_seeds)
        if not lines:
            drawn = _NOTHING_FINITE
            break
        marks = _marks(records, axis) if is_return else []
        for frame in (LARGE, SMALL) if is_return else (SMALL,):  # the style sheet shows the small one on a phone
            drawn += chart(panel.title, lines, axis, panel.may_be_log, frame, marks)
        legend = _legend(lines)
    note = f" <span>{text(panel.note)}</span>" if panel.note else ""
    caption = f"<figcaption>{text(panel.title)}{note}{legend}</figcaption>"
    return f'<figure class="card{" large" if is_return else ""}">{caption}{drawn}</figure>'


def axes(records: Sequence[RunRecord]) -> tuple[Axis, Axis]:
    """Returns the horizontal axes of the charts: environment steps, and the time that the runs ran."""
    seconds = max(record.seconds_at(record.moments).max(initial=0.0) for record in records)
    unit = next((name for name, length in UNITS.items() if seconds >= 2 * length), "seconds")
    return Axis("environment steps", max(record.steps for record in records)), Axis(unit, seconds / UNITS[unit])


def _lines_of(panel: Panel, records: Sequence[RunRecord], axis: Axis, of_seeds: bool) -> list[Line]:
    lines = [line for index, record in enumerate(records) for line in _lines(panel, record, index, len(records), axis)]
    if not of_seeds or not lines:
        return lines
    solid = [line for line in lines if not line.dashed] or lines
    return [*(line._replace(thin=True) for line in solid), *_mean_of_seeds(solid)]


def _grid_of(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""


def _is_flat(panel: Panel, records: Sequence[RunRecord]) -> bool:
    """Whether every metric of a panel has one value for the whole run."""
    series = [record.series(key)[1] for record in records for key in panel.keys.values()]
    values = [value for value in series if value.size]
    return bool(values) and all(np.ptp(value) == 0.0 for value in values)


def _mean_of_seeds(lines: Sequence[Line]) -> list[Line]:
    """Returns the mean of the seeds' lines, with a band from the least to the greatest seed."""
    series = [_in_order(line.x, line.y) for line in lines]
    last = min(x[-1] for x, _ in series)
    x = series[0][0][series[0][0] <= last]
    if not x.size:
        return []
    values = np.stack([np.interp(x, *one) for one in series])
    return [Line("mean of seeds", x, values.mean(axis=0), 0, values.min(axis=0), values.max(axis=0))]


def _in_order(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns points in the order of their steps; a rollback repeats steps."""
    order = np.argsort(x, kind="stable")
    return x[order], values[order]


def _legend(lines: Sequence[Line]) -> str:
    """Returns the names of the lines with their colours; empty for one line."""
    named = [line for line in lines if not line.thin]
    if len(lines) < 2:
        return ""
    entries = [f'<i class="key b{line.colour}{" dash" * line.dashed}"></i>{text(line.name)}' for line in named]
    entries += ["thin: one seed each"] if len(named) < len(lines) else []
    return f'<span class="legend">{" &ensp; ".join(entries)}</span>'


def _marks(records: Sequence[RunRecord], axis: Axis) -> list[Mark]:
    """Returns the target return, and for a single run its rollbacks and its best evaluation."""
    target = records[0].settings.get("eval.target_return")
    marks = [Mark(f"target {target:,g}", None, float(target))] if isinstance(target, int | float) else []
    if len(records) > 1:
        return marks
    (record,) = records
    for event in record.of_kind("rolled_back"):
        (at,) = _positions(record, [event], axis)
        marks.append(Mark(f"step {event.get('step', 0):,}: {event_text(event)}", at, None, "bad"))
    x, values = _series(record, "eval/episode_reward", axis)
    if values.size:
        best = int(values.argmax())
        step = record.series("eval/episode_reward")[0][best]
        label = f"best evaluation: {values[best]:,.1f} at step {step:,.0f}"
        marks.append(Mark(label, float(x[best]), float(values[best]), "good"))
    return marks


def _series(record: RunRecord, key: str, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions and the finite values of a metric, `[N]` each."""
    rows = record.rows_with(key)
    return _positions(record, rows, axis), np.array([row[key] for row in rows], np.float64)


def _positions(record: RunRecord, rows: Sequence[dict[str, Any]], axis: Axis) -> np.ndarray:
    """Returns the positions of rows or events on an axis, `[N]`."""
    if axis.over_steps:
        return np.array([row.get("step", 0) for row in rows], np.float64)
    return record.seconds_at(np.array([row.get("time", 0.0) for row in rows], np.float64)) / UNITS[axis.label]


def _lines(panel: Panel, record: RunRecord, index: int, runs: int, axis: Axis) -> list[Line]:
    lines = []
    for place, (name, key) in enumerate(panel.keys.items()):
        x, values = _series(record, key, axis)
        if not values.size:
            continue
        label = name if runs == 1 else f"{record.name}, {name}"
        line = Line(label, x, values, colour(index if runs > 1 else place), dashed=place > 0)
        if place == 0 and panel.band is not None:
            line = _with_band(line, *(record.series(edge)[1] for edge in panel.band))
        elif key == "eval/episode_reward":
            line = _with_interval(line, record)
        lines.append(line)
    return lines


def _with_band(line: Line, low: np.ndarray, high: np.ndarray) -> Line:
    return line._replace(low=low, high=high) if len(low) == len(high) == len(line.y) else line


def _with_interval(line: Line, record: RunRecord) -> Line:
    """Adds the 95 % interval of a mean return, from the deviation and the number of episodes that were not aborted."""
    rows, episodes = record.rows_with("eval/episode_reward"), record.settings.get("eval.num_envs")
    if not isinstance(episodes, int) or len(record.rows_with("eval/episode_reward_std")) != len(rows):
        return line
    deviation = np.array([row["eval/episode_reward_std"] for row in rows], np.float64)
    kept = np.array([episodes * (1.0 - (row.get("eval/aborted_share") or 0.0)) for row in rows])
    # One episode has no deviation and no interval.
    half = _NORMAL_95 * deviation / np.sqrt(np.maximum(kept - 1.0, 1.0))
    return line._replace(low=line.y - half, high=line.y + half)
