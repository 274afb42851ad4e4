"""Benchmarks, measured in pairs, and the page that shows them.

python -m scripts.bench guards                             # what all default guards cost
python -m scripts.bench guards --env humanoid --pairs 60   # one environment, more pairs
python -m scripts.bench supervision                        # what a supervisor costs that has nothing to do
python -m scripts.bench physics                            # C MuJoCo beside MJX
python -m scripts.bench race                               # whole processes: ours, Brax's PPO, SB3's, SBX's, RSL-RL's
python -m scripts.bench scaling                            # how cost grows with environments, episodes, steps done
python -m scripts.bench seeds                              # several seeds in one program, beside one run each
python -m scripts.bench kernels                            # what runs on the device in an iteration

prints a table and rewrites its own section, for this kind of device, of docs/benchmarks.md. What was measured stays in
docs/bench.jsonl and docs/race.jsonl, so that one part, or what is missing, can be measured by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rlstable import __version__
from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.io.run_folder import write_atomically
from scripts.bench import kernels, parts, scaling, seeds
from scripts.race import page as race_page
from scripts.race import race
from scripts.race.results import device

PENDULUM = ("env=inverted_pendulum", "env.backend=generalized")
# What is trained, by the name that --env takes. An iteration takes a second or so on two CPU cores.
SETTINGS: dict[str, tuple[str, ...]] = {
    "inverted_pendulum": PENDULUM,
    # The same work, which the compiler lays out otherwise on both sides.
    "inverted_pendulum, tanh": (*PENDULUM, "network.activation=tanh"),
    "inverted_pendulum, elu": (*PENDULUM, "network.activation=elu"),
    "inverted_pendulum, gae once": (*PENDULUM, "ppo.gae=per_iteration"),
    "inverted_pendulum, entropy": (*PENDULUM, "ppo.entropy_cost=2e-2"),
    "humanoid": (
        "env=humanoid", "ppo=humanoid", "env.backend=mjx", "ppo.num_envs=256", "ppo.batch_size=128",
        "ppo.num_minibatches=4", "ppo.num_updates_per_batch=8", "ppo.unroll_length=10",
    ),
}  # fmt: skip
COMMON = ("seed=0", "devices=1")
QUIET = ("logging=quiet", "checkpoint=off", "eval.num_evals=0", f"total_steps={2**40}")
WARM_UP = 4  # the third iteration of a run measures how its time divides
RESAMPLES = 10_000
BOOTSTRAP_SEED = 0

TITLE = """# Benchmarks

Written by `python -m scripts.bench`, one section per benchmark and in it one part per kind of device. Text between two
markers is written by the script; everything else stays.
"""
BEGIN, END = "<!-- bench: {} -->", "<!-- end of bench: {} -->"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Attributes:
        name: The subcommand.
        title: Heading of its section.
        text: How it is measured and how to read it.
        header: Of the table; a line may end in it and in cells, for narrow screens.
        cells: The table, text by row.
        notes: What each row was measured with: its settings in code quotes, and what there is to say of it.
        rows: The same and more, for JSON.
        pictures: Of this kind of device, as the page shows them.
        before_notes: What the notes are.
    """

    name: str
    title: str
    text: str
    header: tuple[str, ...]
    cells: list[tuple[str, ...]]
    notes: list[str]
    rows: list[Row]
    pictures: list[str] = dataclasses.field(default_factory=list)
    before_notes: str = "Settings, as `python -m rlstable.train` takes them:"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two configurations, the second of which is judged by the first.

    Attributes:
        name: The subcommand.
        help: Its line in the list of subcommands.
        title: Heading of its section.
        text: How it is measured and how to read it.
        sides: What is typed for each of the two, by the name that its numbers have.
    """

    name: str
    help: str
    title: str
    text: str
    sides: dict[str, str]


PAIRS_TEXT = """are called in turn in
one process, four calls each to warm up and then in pairs; which of the two goes first alternates from pair to pair. A
call is a whole iteration of a run: the compiled program, and what the host does after it."""
COMPARISONS = (
    Comparison(
        "guards",
        "what all default guards cost",
        "Cost of the guards",
        f"""\
Two runs of one configuration and seed, `guards=off` and `guards=default` (limiters included), neither supervised,
{PAIRS_TEXT}
Relative speed is time(off) / time(default), one ratio per pair: a median of 0.97 means 3 % slower with guards. Its 95 %
interval is a bootstrap over pairs. "Not credibly below 0.98": its upper end is 0.98 or more; an upper end below 0.98
would be credible evidence that these two programs differ by more than 2 %. It need not be the guards' doing: any
change of a setting has the compiler lay out both programs anew, which moves the ratio by 2 % either way, beyond the
interval of a single row. Hence several settings of the same work: what guards cost is the middle of them.""",
        {side: f"supervise=off supervise.incident.enabled=false guards={side}" for side in ("off", "default")},
    ),
    Comparison(
        "supervision",
        "what a supervisor costs that has nothing to do",
        "Cost of supervision",
        f"""\
Two runs of one configuration and seed, without and with a supervisor: clipping bounds that a remedy may tighten, a copy
of the last good state every 10 iterations, the ladder of precision, a slot for the first bad environment. They
{PAIRS_TEXT}
Relative speed is time(off) / time(on), one ratio per pair, with the 95 % interval of a bootstrap over pairs. "Not
credibly below 0.99": its upper end is 0.99 or more. Nothing goes bad meanwhile. Settings scatter as for the guards.""",
        {
            "off": "supervise=off supervise.ladder.enabled=false supervise.incident.enabled=false",
            "on": "supervise=default",
        },
    ),
    Comparison(
        "physics",
        "C MuJoCo beside MJX",
        "Native physics",
        f"""\
Two runs of one configuration and seed, `env.backend=mjx` and `env.backend=native` (docs/native.md), all guards on,
{PAIRS_TEXT}
Relative speed is time(mjx) / time(native), one ratio per pair: a median of 2 means that a native iteration, learning
included, takes half the time. The 95 % interval is a bootstrap over pairs. Compilation is not in it.""",
        {"mjx": "env.backend=mjx", "native": "env.backend=native"},
    ),
)


class PageError(Exception):
    """The page cannot be updated, in one line."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: {message}\n")


class Side:
    """One of the two runs, which an iteration at a time is timed of; it is compiled when it is made.

    Args:
        overrides: The configuration, as typed on the command line.
        folder: Where the run is.

    Attributes:
        steps: Environment steps of one call.
    """

    def __init__(self, overrides: Sequence[str], folder: Path):
        from rlstable.runner.loop import TrainingLoop

        self._loop = TrainingLoop(compose([*overrides, *QUIET]), folder)
        self.steps = self._loop.config.env_steps_per_iteration
        self()

    def __call__(self) -> float:
        """Seconds of one iteration, and of what a run does after it."""
        started = time.perf_counter()
        self._loop.advance()
        return time.perf_counter() - started

    @property
    def text(self) -> str:
        """The program as it was compiled, in XLA's words."""
        return str(self._loop._slots.program(self._loop.seeds, self._loop.seeds).executable.as_text())

    @property
    def trips(self) -> dict[str, int]:
        """Over all calls, by guard; those that had any."""
        row = self._loop.single.log.history[-1]
        counts = {name.split("/")[1]: count for name, count in row.items() if re.fullmatch("guards/[^/]+/trips", name)}
        return {name: int(count) for name, count in counts.items() if count}

    def close(self) -> None:
        """Gives its folder free."""
        self._loop.close()


def compare(comparison: Comparison, args: argparse.Namespace, console: Console) -> Iterator[Report]:
    """Two configurations of every environment that was asked for."""

    def measure(name: str) -> list[Row]:
        return [compare_row(comparison, name, args.pairs, console)]

    settings = {name: (*own, *COMMON, *comparison.sides.values()) for name, own in SETTINGS.items()}
    whole = parts.Parts(
        comparison.name, settings, {"pairs": args.pairs}, measure, functools.partial(compared, comparison)
    )
    return part_by_part(whole, args.env, args)


def part_by_part(whole: parts.Parts[Report], asked: Sequence[str] | None, args: argparse.Namespace) -> Iterator[Report]:
    """A report after every part, of all that were measured here, now or before."""
    return parts.run(whole, asked, args.out.parent / "bench.jsonl", device(), versions())


def compared(comparison: Comparison, rows: list[Row]) -> Report:
    """What a comparison found."""
    first, second = comparison.sides
    header = ("env", "relative\nspeed", "95 % interval", f"steps/s\n{first}", f"steps/s\n{second}")
    cells = [
        (
            row["env"],
            f"{row['ratio']:.3f}",
            f"{row['interval'][0]:.3f} – {row['interval'][1]:.3f}",
            f"{row[f'sps_{first}']:,.0f}",
            f"{row[f'sps_{second}']:,.0f}",
        )
        for row in rows
    ]
    notes = []
    for row in rows:
        trips = ", ".join(f"{guard} {count:,}" for guard, count in row["trips"].items()) or "none"
        measured = f"{row['pairs']} pairs, {row['steps']:,} steps a call, trips: {trips}"
        notes.append(f"`{' '.join(row['settings'])}`: {measured}")
    either = " or ".join(f"`{overrides}`" for overrides in comparison.sides.values())
    before = f"Settings, as `python -m rlstable.train` takes them, each followed by {either}:"
    return Report(comparison.name, comparison.title, comparison.text, header, cells, notes, rows, before_notes=before)


def run_race(args: argparse.Namespace, console: Console) -> list[Report]:
    """Whole processes beside each other, and how far they have got on this kind of device."""
    results, where = race.run(args)
    sections = race_page.sections(results, where["kind"], args.out.parent)
    return [Report(**vars(section), before_notes=race_page.SETTINGS) for section in sections]


def run_scaling(args: argparse.Namespace, console: Console) -> Iterator[Report]:
    """Steps per second over what might make them dearer."""

    def measure(task: str) -> list[Row]:
        return scaling.run(task, args.seconds, Side, console.print)

    def report(rows: list[Row]) -> Report:
        return Report(**vars(scaling.section(rows, device()["kind"], args.out.parent)))

    return part_by_part(
        parts.Parts(scaling.NAME, scaling.PARTS, {"seconds": args.seconds}, measure, report), args.task, args
    )


def run_seeds(args: argparse.Namespace, console: Console) -> Iterator[Report]:
    """Several seeds in one program beside one run each."""

    def measure(task: str) -> list[Row]:
        return [seeds.run(task, args.seeds, args.rounds, console.print)]

    def report(rows: list[Row]) -> Report:
        return Report(**vars(seeds.section(rows)))

    asked = {"seeds": args.seeds, "rounds": args.rounds}
    return part_by_part(parts.Parts(seeds.NAME, seeds.PARTS, asked, measure, report), args.task, args)


def run_kernels(args: argparse.Namespace, console: Console) -> Iterator[Report]:
    """What an iteration is made of."""

    def measure(task: str) -> list[Row]:
        with console.status(f"{task}: compiling and profiling"):
            return [kernels.run(task, Side)]

    def report(rows: list[Row]) -> Report:
        return Report(**vars(kernels.section(rows)))

    return part_by_part(parts.Parts(kernels.NAME, kernels.PARTS, {}, measure, report), args.task, args)


def compare_row(comparison: Comparison, name: str, pairs: int, console: Console) -> Row:
    """One environment's times in two configurations."""
    settings = [*SETTINGS[name], *COMMON]
    sides: dict[str, Side] = {}
    with contextlib.ExitStack() as stack:
        for choice, overrides in comparison.sides.items():
            with console.status(f"{name}: compiling {overrides}"):
                started = time.perf_counter()
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                sides[choice] = Side([*settings, *overrides.split()], folder)
                stack.callback(sides[choice].close)
            console.print(f"{name}: {overrides} is ready after {time.perf_counter() - started:.1f} s")
        (first, one), (second, other) = sides.items()
        seconds, seconds_other = time_in_turn(one, other, track(range(pairs), name, console=console))
    ratio, low, high = median_and_interval(seconds / seconds_other)
    return {
        "env": name,
        "settings": settings,
        "ratio": ratio,
        "interval": [low, high],
        f"sps_{first}": one.steps / float(np.median(seconds)),
        f"sps_{second}": other.steps / float(np.median(seconds_other)),
        "pairs": pairs,
        "steps": one.steps,
        "trips": other.trips,
        f"seconds_{first}": np.round(seconds, 6).tolist(),
        f"seconds_{second}": np.round(seconds_other, 6).tolist(),
    }


def time_in_turn(
    first: Callable[[], float], second: Callable[[], float], numbers: Iterable[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Calls two things in pairs, after both have warmed up; in odd pairs the second goes first.

    Args:
        first: Called for the seconds it took.
        second: The other.
        numbers: Of the pairs.

    Returns:
        Seconds of the first and of the second, `[pairs]`.
    """
    for _ in range(WARM_UP):
        first()
        second()
    times = []
    for number in numbers:
        if number % 2:
            late = second()
            times.append((first(), late))
        else:
            times.append((first(), second()))
    return tuple(np.array(times).T)


def median_and_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % percentile bootstrap interval; the same every time."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    medians = np.median(values[rng.integers(len(values), size=(RESAMPLES, len(values)))], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def versions() -> dict[str, str]:
    """What it was measured with."""
    packages = {"jax": "jax", "brax": "brax", "mujoco": "mujoco", "mjx": "mujoco-mjx"}
    installed = {name: metadata.version(package) for name, package in packages.items()}
    return {"python": platform.python_version(), **installed, "rlstable": __version__}


def markdown(report: Report, where: Row, what: Mapping[str, str]) -> str:
    """A device's part of a section."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |".replace("\n", " ")

    parts = [
        f"### {where['kind']}\n",
        line(report.header),
        line(["---"] + ["---:"] * (len(report.header) - 1)),
        *map(line, report.cells),
        "",
        f"Device: platform {where['platform']}, kind {where['kind']}, {where['cpus']} CPUs. "
        f"Versions: {', '.join(f'{name} {version}' for name, version in what.items())}{_commits(report.rows)}.\n",
        *(f"{picture}\n" for picture in report.pictures),
        f"{report.before_notes}\n",
        *(f"- {note}" for note in report.notes),
    ]
    return "\n".join(parts) + "\n"


def _commits(rows: Sequence[Row]) -> str:
    """Those that rows were measured at, as far as it is known."""
    known = dict.fromkeys(row["commit"] for row in rows if row.get("commit"))
    return f" ({', '.join(known)})" if known else ""


def read_page(path: Path) -> str:
    """The page as it is, empty where there is none yet.

    Raises:
        PageError: It cannot be read, or not be written later.
    """
    if not path.parent.is_dir():
        raise PageError(f"--out: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise PageError(f"--out: cannot write to {path.parent}")
    try:
        return path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise PageError(f"--out: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def write_page(path: Path, text: str) -> None:
    """Writes the page, whole or not at all.

    Raises:
        PageError: It cannot be written.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise PageError(f"--out: cannot write to {path}: {error.strerror or error}") from error


def cut(page: str, name: str) -> tuple[str, dict[str, str], str]:
    """What stands before a section, its parts by kind of device, and what stands after it.

    Raises:
        PageError: Its markers do not match, so that something would be lost.
    """
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in page and end not in page:
        return f"{(page or TITLE).rstrip()}\n\n", {}, "\n"
    before, _, rest = page.partition(begin)
    inside, _, after = rest.partition(end)
    if page.count(begin) != 1 or rest.count(end) != 1 or end in before:
        raise PageError(f"--out: the section {name} must have one {begin} and after it one {end}")
    first, last = (marker.format(f"{name} on ").removesuffix(" -->") for marker in (BEGIN, END))
    found = re.findall(f"{re.escape(first)}(.+?) -->\n(.*?){re.escape(last)}\\1 -->\n", inside, re.DOTALL)
    if not len(found) == inside.count(first) == inside.count(last):
        raise PageError(f"--out: a part of the section {name} has lost a marker; mend it first")
    return before, dict(found), after


def updated(page: str, report: Report, kind: str, body: str) -> str:
    """The page with one device's part of one section written anew, or appended.

    Args:
        page: The page as it is.
        report: Whose section.
        kind: Of the device.
        body: The new part.

    Raises:
        PageError: The page's markers do not match.
    """
    before, parts, after = cut(page, report.name)
    blocks = [f"## {report.title}\n\n{report.text}\n"]
    blocks += [_marked(f"{report.name} on {key}", part) for key, part in (parts | {kind: body}).items()]
    return before + _marked(report.name, "\n".join(blocks)).rstrip("\n") + after


def _marked(name: str, body: str) -> str:
    return f"{BEGIN.format(name)}\n{body}{END.format(name)}\n"


def show(report: Report, console: Console) -> None:
    """Prints the table."""
    table = Table(title=report.title)
    for number, name in enumerate(report.header):
        table.add_column(name, justify="right" if number else "left")
    for cells in report.cells:
        table.add_row(*cells)
    console.print(table)
    for note in report.notes:
        console.print(note, soft_wrap=True)


def make_parser() -> Parser:
    """One subcommand per benchmark."""
    parser = Parser(prog="bench", description="Measures, prints a table and writes it into the page of benchmarks.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="benchmark", parser_class=Parser)
    shared = Parser(add_help=False)
    shared.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks.md"), help="page whose part for this device is written anew"
    )
    shared.add_argument("--json", action="store_true", help="print the result as one line of JSON, the rest on stderr")
    for comparison in COMPARISONS:
        command = commands.add_parser(comparison.name, parents=[shared], help=comparison.help)
        command.add_argument("--env", action="append", choices=SETTINGS, help="may be repeated; all of them by default")
        command.add_argument("--pairs", type=_pairs, default=30, help="pairs of calls, 30 by default")
        command.set_defaults(benchmark=functools.partial(compare, comparison), sections=(comparison.name,))
    command = commands.add_parser("race", parents=[shared], help="whole processes: ours, Brax's PPO and others'")
    race.add_arguments(command)
    command.set_defaults(benchmark=run_race, sections=race_page.NAMES)
    command = commands.add_parser(scaling.NAME, parents=[shared], help="how cost grows, and with what")
    scaling.add_arguments(command)
    command.set_defaults(benchmark=run_scaling, sections=(scaling.NAME,))
    command = commands.add_parser(seeds.NAME, parents=[shared], help="several seeds in one program")
    seeds.add_arguments(command)
    command.set_defaults(benchmark=run_seeds, sections=(seeds.NAME,))
    command = commands.add_parser(kernels.NAME, parents=[shared], help="what runs on the device in an iteration")
    kernels.add_arguments(command)
    command.set_defaults(benchmark=run_kernels, sections=(kernels.NAME,))
    return parser


def _pairs(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 2 or more")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one benchmark; a mistake is one line and exit code 2."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    console = Console(stderr=args.json, highlight=False)
    try:
        for section in args.sections:
            cut(read_page(args.out), section)  # before measuring: a mistake there costs minutes
        found: dict[str, Report] = {}
        for report in args.benchmark(args, console):
            found[report.name] = report
            where, what = device(), versions()
            page = updated(read_page(args.out), report, where["kind"], markdown(report, where, what))
            write_page(args.out, page)
        for report in found.values():
            show(report, console)
            if args.json:
                print(json.dumps({"benchmark": report.name, "device": where, "versions": what, "rows": report.rows}))
    except (ConfigError, PageError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
