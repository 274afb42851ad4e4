"""A report as tables for a terminal and as data for programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from rlstable.doctor.checkup import Environments, Memory, Report
from rlstable.doctor.finding import listed
from rlstable.supervise import arithmetic
from rlstable.supervise.memory import readable

_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


def sections(report: Report) -> list[tuple[str, Any]]:
    """Returns the titles and contents of the sections, in order."""
    return [
        ("Machine", _machine(report)),
        ("Matrix products", _products(report)),
        ("Memory and environments", _memory(report.memory, report.environments)),
        (f"Findings ({report.task}, {report.engine})", _findings(report)),
    ]


def _machine(report: Report) -> Table:
    around = report.surroundings
    settings = {name: value for name, value in around.settings.items() if value not in ("None", "False")}
    rows = [
        ("device", around.devices),
        *([] if around.driver in around.devices else [("driver", around.driver)]),
        *(("nvidia-smi", line) for line in around.nvidia),
        ("processor", around.processor),
        ("versions", ", ".join(f"{name} {version}" for name, version in around.versions.items())),
        ("settings", ", ".join(f"{name}={value}" for name, value in settings.items()) or "none that change results"),
    ]
    return _pairs(rows)


def _products(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    numeric = ("bits", "rms error", "largest")
    for header in ("  precision.matmul", "arithmetic", "bits", "rms error", "largest", ""):
        table.add_column(header, no_wrap=True, justify="right" if header in numeric else "left")
    distinct, undelivered = arithmetic.distinct_levels(report.products), arithmetic.undelivered(report.products)
    for level, accuracy in report.products.items():
        remark = "less than requested" if level in undelivered else ""
        if not remark and level not in distinct:
            remark = "no better than above"
        numbers = (f"{accuracy.bits:.1f}", f"{accuracy.rms_error:.1e}", f"{accuracy.max_error:.1e}")
        table.add_row(f"  {level}", accuracy.kind, *numbers, Text(remark, style="dim"))
    works = "exact" if report.x64_error == 0 else f"error {report.x64_error:.1e}"
    table.add_row("  float64 (x64)", works)
    return table


def _memory(memory: Memory | None, environments: Environments | None) -> Table:
    if memory is None or environments is None:
        return _pairs([("", "unknown, because the training program cannot be built")])
    limit = "unknown" if memory.limit is None else readable(memory.limit)
    if memory.needed is None or memory.footprint is None:
        rows = [("training", "not estimated"), ("limit", limit)]
    else:
        parts = memory.footprint
        share = "" if memory.share is None else f", {_percent(memory.share)} of the limit"
        rows = [
            ("training", f"{readable(memory.needed)}{share}"),
            ("per device", f"{readable(parts.arguments)} of state, {readable(parts.temporary)} while the program runs"),
            ("limit", limit),
        ]
    if memory.live is not None:
        rows.append(("in use now", readable(memory.live)))
    rows += [
        ("an environment", f"{readable(memory.per_environment)} of state between steps"),
        ("a batch", f"at least {readable(memory.rows)} of experience in one iteration"),
        ("ppo.num_envs", _advice(environments)),
    ]
    return _pairs(rows)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"


def _advice(environments: Environments) -> str:
    configured, top = environments.configured, environments.allowed[-1]
    text = f"{configured:,} configured, {top:,} at most for this batch (batch_size * num_minibatches)"
    if environments.most is None or environments.most <= configured:
        return text
    return f"{text}; memory is enough for {'these' if environments.most == top else f'{environments.most:,}'}"


def _findings(report: Report) -> Any:
    if not report.findings:
        return Text("  no findings")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in report.findings:
        subject = f" ({listed(finding.subject)})" if finding.subject else ""
        text = Text.assemble(
            (f"{finding.check}{subject}: ", "bold"), f"{finding.what}.\n", ("do: ", "dim"), finding.advice
        )
        table.add_row(Text(f"  {finding.severity}", style=_STYLES[finding.severity]), text)
    return table


def _pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(f"  {name}", Text(value))
    return table


def as_data(report: Report) -> dict[str, Any]:
    """Returns the report as data for JSON; numbers that are not finite become null."""
    memory_data = None
    if report.memory is not None:
        peak = report.memory.footprint and {"peak": report.memory.footprint.peak}
        memory_data = dataclasses.asdict(report.memory)
        memory_data["footprint"] = peak and {**memory_data["footprint"], **peak}
    data = {
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "task": report.task,
        "engine": report.engine,
        **dataclasses.asdict(report.surroundings),
        "matrix_products": {
            level: {**dataclasses.asdict(accuracy), "kind": accuracy.kind}
            for level, accuracy in report.products.items()
        },
        "distinct_levels": arithmetic.distinct_levels(report.products),
        "undelivered_levels": arithmetic.undelivered(report.products),
        "x64_error": report.x64_error,
        "memory": memory_data,
        "environments": None if report.environments is None else dataclasses.asdict(report.environments),
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
    }
    return _plain(data)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
