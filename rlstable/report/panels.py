"""Charts of metrics over environment steps: their metrics, lines, bands, marks and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlstable.report.chart import Line, Mark, chart, mean_of
from rlstable.report.markup import COLOURS, text
from rlstable.report.run_record import RETURN, RunRecord, event_text, is_number

CONTROLS = (
    '<p class="controls"><label>smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" '
    'value="0" autocomplete="off"></label></p>'
)
_TERM = "episode/reward/"  # prefix of the metrics of a reward's terms
_BY_TERM = "Reward by term"
_FIRST = (
    _BY_TERM, "Episode length", "Level of the ground", "Value loss", "Policy distance", "Explained variance", "Entropy",
    "Throughput",
)  # fmt: skip
_NORMAL_95 = 1.96  # standard errors to each side


class Panel(NamedTuple):
    """A chart of metrics."""

    title: str
    note: str  # meaning or unit
    keys: dict[str, str]  # metrics by name of the line; the second line is dashed, unless `alike`
    may_be_log: bool = False  # whether a wide range gets a logarithmic scale
    band: tuple[str, str] | None = None  # metrics of the edges of a band around the first line
    alike: bool = False  # whether all lines are of one kind


PANELS = (
    Panel("Return", "mean of evaluations with its 95 % interval; training dashed",
          {"evaluation": RETURN, "training": "episode/sum_reward"}),
    Panel("Episode length", "steps", {"evaluation": "eval/avg_episode_length", "training": "episode/length"}),
    Panel("Level of the ground", "on which episodes of training begin, mean", {"level": "episode/terrain_level"}),
    Panel("Value loss", "", {"value loss": "training/v_loss"}, True),
    Panel("Policy loss", "", {"policy loss": "training/policy_loss"}),
    Panel("Entropy", "of the policy", {"entropy": "training/entropy"}),
    Panel("Policy distance", "nats per action element, of actions that the environment gets",
          {"distance": "training/policy_distance"}, True),
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
    """The charts except the return: first what matters most, the rest folded away.

    `of_seeds` says whether the runs differ only in their seed.
    """
    drawn = {panel.title: figure(panel, records, of_seeds) for panel in (*_by_term(records), *PANELS[1:])}
    first, rest = (
        [svg for title, svg in drawn.items() if svg and (title in _FIRST) == wanted] for wanted in (True, False)
    )
    if not (first or rest):
        return "<h2>Curves</h2><p>The run logged no metrics.</p>" if not any(record.rows for record in records) else ""
    shown, folded = (f'<div class="charts">{"".join(figures)}</div>' for figures in (first, rest))
    more = f"<details><summary>{len(rest)} more curves</summary>{folded}</details>" if rest else ""
    return f"<h2>Curves</h2>{shown}{more}"


def _by_term(records: Sequence[RunRecord]) -> list[Panel]:
    """The chart of the terms of the reward, if the environment reports them; of one run only."""
    if len(records) > 1:
        return []
    found = {key for row in records[0].rows for key in row if key.startswith(_TERM)}
    greatest = sorted(found, key=lambda key: (-abs(records[0].last(key) or 0.0), key))
    terms = {key.removeprefix(_TERM): key for key in greatest}
    return [Panel(_BY_TERM, "mean sum over an episode in training", terms, alike=True)] if terms else []


def figure(panel: Panel, records: Sequence[RunRecord], of_seeds: bool) -> str:
    """The chart of a panel with its title and legend; empty if the runs did not log its metrics.

    The first of `PANELS` is large and has marks. Of runs that differ only in their seed, the mean is drawn, too.
    """
    if not any(key in row for record in records for row in record.rows for key in panel.keys.values()):
        return ""
    lines = [line for index, record in enumerate(records) for line in _lines(panel, record, index, len(records))]
    if of_seeds and lines:
        solid = [line for line in lines if not line.dashed] or lines
        lines = [*(line._replace(thin=True) for line in solid), mean_of(solid, "mean of seeds", 0)]
    large = panel is PANELS[0]
    drawn = '<p class="bad">no finite value was logged</p>'
    if lines:
        end = max(record.steps for record in records)
        drawn = chart(panel.title, lines, end, panel.may_be_log, large, _marks(records) if large else [])
    note = f" <span>{text(panel.note)}</span>" if panel.note else ""
    caption = f"<figcaption>{text(panel.title)}{note}{_legend(lines)}</figcaption>"
    return f'<figure class="card{" large" if large else ""}">{caption}{drawn}</figure>'


def _legend(lines: Sequence[Line]) -> str:
    """The names of the lines with their colours; empty for one line."""
    named = [line for line in lines if not line.thin]
    if len(lines) < 2:
        return ""
    key = '<span class="word"><i class="key b{}{}"></i>{}</span>'
    entries = [key.format(line.colour, " dash" * line.dashed, text(line.name)) for line in named]
    entries += ["thin: one seed each"] if len(named) < len(lines) else []
    return f'<span class="legend">{" &ensp; ".join(entries)}</span>'


def _marks(records: Sequence[RunRecord]) -> list[Mark]:
    target = records[0].settings.get("eval.target_return")
    marks = [Mark(f"target {target:,g}", None, target)] if target is not None and is_number(target) else []
    if len(records) > 1:
        return marks
    (record,) = records
    for event in record.of_kind("rolled_back"):
        step = event.get("step", 0)
        marks.append(Mark(f"step {step:,}: {event_text(event)}", step, None, "bad"))
    steps, values = record.series(RETURN)
    if values.size:
        best = int(np.argmax(values))
        label = f"best evaluation: {values[best]:,.1f} at step {steps[best]:,.0f}"
        marks.append(Mark(label, float(steps[best]), float(values[best]), "good"))
    return marks


def _lines(panel: Panel, record: RunRecord, index: int, runs: int) -> list[Line]:
    lines = []
    for place, (name, key) in enumerate(panel.keys.items()):
        steps, values = record.series(key)
        if not values.size:
            continue
        label = name if runs == 1 else f"{record.name}, {name}"
        dashed = place > 0 and not panel.alike
        line = Line(label, steps, values, (index if runs > 1 else place) % COLOURS, dashed=dashed)
        if place == 0 and panel.band is not None:
            low, high = (record.series(edge)[1] for edge in panel.band)
            line = line._replace(band=(low, high)) if len(low) == len(high) == len(values) else line
        elif key == RETURN:
            line = _with_interval(line, record)
        lines.append(line)
    return lines


def _with_interval(line: Line, record: RunRecord) -> Line:
    """Adds the 95 % interval of a mean return, from the deviation and the number of episodes that were not aborted."""
    rows, episodes = record.rows_with(RETURN), record.settings.get("eval.num_envs")
    if not isinstance(episodes, int) or len(record.rows_with(f"{RETURN}_std")) != len(rows):
        return line
    deviation = np.array([row[f"{RETURN}_std"] for row in rows], np.float64)
    shares = (row.get("eval/aborted_share") for row in rows)
    kept = np.array([episodes * (1.0 - share if isinstance(share, float) else 1.0) for share in shares])
    # One episode has no deviation and no interval.
    half = _NORMAL_95 * deviation / np.sqrt(np.maximum(kept - 1.0, 1.0))
    return line._replace(band=(line.y - half, line.y + half))
