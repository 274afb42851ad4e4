"""Compares the replayed step of all engines and names the origin of the bad number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from rlstable.replay.engines import FLOAT32, FLOAT64, C, Outcome, own_engine
from rlstable.supervise.incident import (
    BadNumber,
    Incident,
    find_bad_numbers,
    group,
    in_causal_order,
    limits_of,
    magnitude,
)

BEFORE, RUN = "before", "in the run"
_MAIN = ("action", "ctrl", "act", "qacc", "qdd", "qacc_warmstart", "qvel", "qd", "qpos", "q", "reward", "done")


class Report(NamedTuple):
    """A replayed incident."""

    incident: Incident
    columns: dict[str, Mapping[str, np.ndarray]]  # arrays before the step, after it in the run, and in each engine
    bad: dict[str, list[BadNumber]]  # bad values by column
    same: str  # comparison of the run with the engine that has the run's arithmetic
    first: str  # the quantity that went bad first, and its engines
    conclusion: str  # the origin of the bad number
    notes: dict[str, str]  # remarks by engine


def compare(incident: Incident, outcomes: list[Outcome]) -> Report:
    action = {"action": incident.arrays["action"]}
    columns: dict[str, Mapping[str, np.ndarray]] = {
        BEFORE: incident.part("before"),
        RUN: incident.part("after") | action,
        **{outcome.engine: outcome.arrays for outcome in outcomes},
    }
    limits = limits_of(incident.config.guards)
    bad = {name: find_bad_numbers(arrays, limits) for name, arrays in columns.items()}
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
    """Returns in words whether the arrays that both have are equal, and their greatest difference."""
    names = [name for name in in_causal_order(run) if name in again]
    different = [name for name in names if not np.array_equal(run[name], again[name], equal_nan=_is_float(run[name]))]
    if not different:
        return "bit for bit what the run had"
    name = max(different, key=lambda name: _distance(run[name], again[name]))
    return (
        f"{len(different)} of {len(names)} arrays differ from the run's, most of all {name}, "
        f"by {_distance(run[name], again[name]):.1e} of its magnitude"
    )


def _is_float(array: np.ndarray) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))


def _distance(run: np.ndarray, again: np.ndarray) -> float:
    """The difference as a share of the magnitude; infinite if only one array is finite."""
    run, again = run.astype(np.float64), again.astype(np.float64)
    if not np.array_equal(np.isfinite(run), np.isfinite(again)):
        return float("inf")
    finite = np.isfinite(run)
    return float(np.max(np.abs(run - again)[finite], initial=0.0)) / max(magnitude(run), 1e-30)


def _first(bad: Mapping[str, list[BadNumber]], engines: list[str]) -> str:
    found = [engine for engine in engines if bad[engine]]
    if not found:
        return "no engine has a bad value"
    array = in_causal_order(bad[engine][0].array for engine in found)[0]
    where = {engine: one for engine in found for one in bad[engine] if one.array == array}
    without = [engine for engine in engines if engine not in where]
    fine = f", not in {_listed(without)}" if without else ""
    return f"{next(iter(where.values()))} in {_listed(list(where))}{fine}"


def conclude(incident: Incident, bad: Mapping[str, list[BadNumber]], engines: list[str]) -> str:
    replayed, own = [engine for engine in engines if bad[engine]], own_engine(incident)
    if any(one.array == "action" for one in bad[RUN]):
        return "the action was bad before the step: the policy is the cause; see the trips of update and state guards."
    if not replayed:
        if incident.facts["fault"] is not None:
            return (
                f"not reproduced: the run injected fault.site={incident.facts['fault']}; without the fault the step "
                "is healthy."
            )
        return "not reproduced: the bad number did not come from the step (hardware, another version of a library)."
    if own not in replayed:
        return f"bad in {_listed(replayed)} only, not in {own} as the run was: another version of a library, or chance."
    if replayed == [FLOAT32]:
        if FLOAT64 not in engines:
            return "bad in float32, the only precision of its physics, and not in C MuJoCo: try precision=highest."
        return "bad in float32 only: try precision=highest, then float64 physics (precision.matmul=x64)."
    if not any(group(one.array) == "physics" for one in bad[own]):
        return f"the physics is fine and {bad[own][0].array} is bad: look at how the environment computes it."
    if C not in engines:
        return f"bad in {_listed(replayed)}: the model or the environment's code; see python -m rlstable.doctor."
    if C in replayed:
        return "bad in all three: the model itself; see python -m rlstable.doctor."
    return (
        "bad in MJX at both precisions but not in C MuJoCo: MJX's solver or contacts; try more solver iterations "
        "and see python -m rlstable.doctor."
    )


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def rows(report: Report) -> list[tuple[str, list[str]]]:
    """The rows of the table in the order in which a bad number spreads, with one cell per column."""
    filled = {name for arrays in report.columns.values() for name, array in arrays.items() if array.size}
    names = in_causal_order(filled)
    main = [name for name in names if group(name) == "obs" or name.removeprefix(f"{name.split('/')[0]}/") in _MAIN]
    others = [one.array for name in report.columns for one in report.bad[name] if one.array not in main]
    chosen = in_causal_order([*main, *dict.fromkeys(others)])
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
    shown = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    shown.add_column("  largest magnitude, or bad value", no_wrap=True)
    for column in report.columns:
        shown.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows(report):
        wrong = [any(one.array == name for one in report.bad[column]) for column in report.columns]
        texts = [Text(cell, style="bold red" if bad else "") for cell, bad in zip(cells, wrong, strict=True)]
        shown.add_row(f"  {name}", *texts)
    return shown


def as_data(report: Report) -> dict[str, Any]:
    """The sentences of the report as data for JSON; `incident.json` has the facts of the incident."""
    return {
        "incident": str(report.incident.folder),
        "conclusion": report.conclusion,
        "first": report.first,
        "as_in_the_run": report.same,
        "notes": report.notes,
    }
