"""Compares a step in each engine side by side, and names the origin of the bad number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from rlstable.replay.engines import FLOAT32, C, Outcome, own_engine
from rlstable.supervise.bad_values import BadNumber, find_bad_numbers, group, in_causal_order, magnitude
from rlstable.supervise.incident import Incident, limits_of

BEFORE, RUN = "before", "in the run"
SAME = "bit for bit what the run had"
MAIN = ("action", "ctrl", "act", "qacc", "qdd", "qacc_warmstart", "qvel", "qd", "qpos", "q", "reward", "done")
_MOST_OTHERS = 5  # bad arrays that are shown besides


class Report(NamedTuple):
    """An incident stepped again.

    Attributes:
        incident: Which.
        columns: Arrays by name: before the step, what the run had after it, and what each engine has.
        bad: What is bad, by column.
        same: Whether the engine that computes as the run did gives what the run had, or how far apart they are.
        first: Which quantity went bad first, and in which engines.
        conclusion: What that says.
        notes: What else an engine said, by engine.
    """

    incident: Incident
    columns: dict[str, Mapping[str, np.ndarray]]
    bad: dict[str, list[BadNumber]]
    same: str
    first: str
    conclusion: str
    notes: dict[str, str]


def judge(incident: Incident, outcomes: list[Outcome]) -> Report:
    """Compares the engines."""
    action = {"action": incident.arrays["action"]}
    columns: dict[str, Mapping[str, np.ndarray]] = {
        BEFORE: incident.part("before"),
        RUN: incident.part("after") | action,
        **{outcome.engine: outcome.arrays for outcome in outcomes},
    }
    limits = limits_of(incident.config)
    bad = {name: find_bad_numbers(columns[name], limits) for name in (BEFORE, RUN)}
    bad |= {outcome.engine: outcome.bad for outcome in outcomes}
    engines = [outcome.engine for outcome in outcomes]
    return Report(
        incident,
        columns,
        bad,
        f"{own_engine(incident)}: {compared(columns[RUN], columns[own_engine(incident)])}",
        _first(bad, engines),
        conclude(incident, bad, engines),
        {outcome.engine: outcome.note for outcome in outcomes if outcome.note},
    )


def compared(run: Mapping[str, np.ndarray], again: Mapping[str, np.ndarray]) -> str:
    """`SAME`, or how far the arrays that both have are apart."""
    names = [name for name in in_causal_order(run) if name in again]
    different = [name for name in names if run[name].tobytes() != again[name].astype(run[name].dtype).tobytes()]
    different = [
        name for name in different if not np.array_equal(run[name], again[name], equal_nan=_is_float(run[name]))
    ]
    if not different:
        return SAME
    name = max(different, key=lambda name: _distance(run[name], again[name]))
    return (
        f"{len(different)} of {len(names)} arrays differ from the run's, most of all {name}, "
        f"by {_distance(run[name], again[name]):.1e} of its magnitude"
    )


def _is_float(array: np.ndarray) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))


def _distance(run: np.ndarray, again: np.ndarray) -> float:
    """Difference as a share of the magnitude; infinite if only one of the two is finite."""
    run, again = run.astype(np.float64), again.astype(np.float64)
    if not np.array_equal(np.isfinite(run), np.isfinite(again)):
        return float("inf")
    finite = np.isfinite(run)
    return float(np.max(np.abs(run - again)[finite], initial=0.0)) / max(magnitude(run), 1e-30)


def _first(bad: Mapping[str, list[BadNumber]], engines: list[str]) -> str:
    found = [engine for engine in engines if bad[engine]]
    if not found:
        return "nothing is bad in any of them"
    by_engine = {engine: bad[engine][0].array for engine in found}
    array = in_causal_order(by_engine.values())[0]
    where = [engine for engine in found if any(one.array == array for one in bad[engine])]
    without = [engine for engine in engines if engine not in where]
    fine = f", not in {_listed(without)}" if without else ""
    return f"{bad[where[0]][[one.array for one in bad[where[0]]].index(array)]} in {_listed(where)}{fine}"


def conclude(incident: Incident, bad: Mapping[str, list[BadNumber]], engines: list[str]) -> str:
    """One sentence: where the bad number comes from, and what to do."""
    again, own = [engine for engine in engines if bad[engine]], own_engine(incident)
    if any(one.array == "action" for one in bad[RUN]):
        return "the action was bad before the step: the policy gave it, look at the update and state guards' trips."
    if not again:
        if incident.facts["fault"] is not None:
            return (
                f"not reproduced: the run injected fault.site={incident.facts['fault']} on purpose, and without it the "
                "step is healthy."
            )
        return "not reproduced: the bad number did not come from the step (hardware, another version of a library)."
    if own not in again:
        return f"bad in {_listed(again)} only, not in {own} as in the run: another version of a library, or chance."
    if again == [FLOAT32]:
        return "bad in float32 only: try precision=highest, then physics in float64, precision.matmul=x64."
    if not any(group(one.array) == "physics" for one in bad[own]):
        return f"the physics is fine and {bad[own][0].array} is bad: look at how the environment computes it."
    if C not in engines:
        return f"bad in {_listed(again)}: the model itself, or the environment's code; see python -m rlstable.doctor."
    if C in again:
        return "bad in all three: the model itself; see python -m rlstable.doctor."
    return (
        "bad in MJX, whatever the precision, and not in C MuJoCo: MJX's solver or contacts; try more solver iterations "
        "and see python -m rlstable.doctor."
    )


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def rows(report: Report) -> list[tuple[str, list[str]]]:
    """The table: quantities in the order in which a bad number travels, each with one cell per column."""
    names = in_causal_order(
        {name for arrays in report.columns.values() for name, array in arrays.items() if array.size}
    )
    main = [name for name in names if group(name) == "obs" or name.removeprefix(f"{name.split('/')[0]}/") in MAIN]
    others = [one.array for name in report.columns for one in report.bad[name] if one.array not in main]
    chosen = in_causal_order([*main, *list(dict.fromkeys(others))[:_MOST_OTHERS]])
    return [(name, [_cell(report, column, name) for column in report.columns]) for name in chosen]


def _cell(report: Report, column: str, name: str) -> str:
    array = report.columns[column].get(name)
    if array is None:
        return ""
    for one in report.bad[column]:
        if one.array == name:
            place = f" at {', '.join(map(str, one.place))}" if one.place else ""
            return f"{one.value:.3g}{place}"
    return f"{magnitude(array):.3g}" if _is_float(array) else "fine"


def table(report: Report) -> Table:
    """For a terminal; what is bad is red."""
    shown = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    shown.add_column("  largest magnitude, or what is bad", no_wrap=True)
    for column in report.columns:
        shown.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows(report):
        wrong = [any(one.array == name for one in report.bad[column]) for column in report.columns]
        texts = [Text(cell, style="bold red" if bad else "") for cell, bad in zip(cells, wrong, strict=True)]
        shown.add_row(f"  {name}", *texts)
    return shown


def as_data(report: Report) -> dict[str, Any]:
    """The report as plain data for JSON; what is not finite becomes text."""
    facts = report.incident.facts
    return {
        "incident": str(report.incident.folder),
        "causes": facts["causes"],
        "fault": facts["fault"],
        "conclusion": report.conclusion,
        "first": report.first,
        "as_in_the_run": report.same,
        "notes": report.notes,
        "bad": {
            column: [
                {"array": one.array, "place": one.place, "value": f"{one.value:g}", "why": one.why} for one in found
            ]
            for column, found in report.bad.items()
        },
        "quantities": [
            {"quantity": name, **dict(zip(report.columns, cells, strict=True))} for name, cells in rows(report)
        ],
    }
