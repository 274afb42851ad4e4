"""Runs a benchmark, prints its table and rewrites its section of docs/benchmarks.md for this kind of device.

python -m scripts.bench guards                             # cost of all default guards
python -m scripts.bench guards --env humanoid --pairs 60   # one environment, more pairs
python -m scripts.bench supervision                        # cost of a supervisor that has nothing to do
python -m scripts.bench physics                            # C MuJoCo beside MJX
python -m scripts.bench race --minutes 90                  # whole processes: rlstable, Brax's PPO, SB3, SBX, RSL-RL
python -m scripts.bench scaling                            # cost over environments, episode length, steps done
python -m scripts.bench seeds                              # several seeds in one program, beside one run per seed
python -m scripts.bench kernels                            # kernels of an iteration on the device
python -m scripts.bench host                               # the host's part of an iteration
python -m scripts.bench gpu --minutes 60                   # all that can run on a GPU, most telling first

The measurements stay in docs/bench.jsonl and docs/race.jsonl. Each is saved and the page is written when it ends, so
that a benchmark can be stopped at any time. With --minutes nothing is started that would not end in time.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from rlstable.config import ConfigError
from scripts import pages, results, sittings
from scripts.bench import gpu, host, kernels, scaling, seeds
from scripts.bench.comparisons import COMPARISONS
from scripts.bench.parts import PartsRun
from scripts.pages import Section
from scripts.race import page as race_page
from scripts.race import race
from scripts.sittings import Sitting


class Parser(argparse.ArgumentParser):
    """Prints an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: {message}\n")


def versions() -> dict[str, str]:
    """Returns the versions that docs/bench.jsonl records."""
    return {"mjx" if name == "mujoco-mjx" else name: version for name, version in results.versions().items()}


def prepared(args: argparse.Namespace, console: Console) -> race.Race | PartsRun:
    """Returns the benchmark of a command line with its measurements so far."""
    if args.benchmark is race:
        return race.Race(args)
    parts = args.benchmark.parts(args, console)
    return PartsRun(parts, args.out.parent / "bench.jsonl", results.device(), versions())


def show(section: Section, console: Console) -> None:
    table = Table(title=section.title)
    for number, name in enumerate(section.header):
        table.add_column(name, justify="right" if number else "left")
    for cells in section.cells:
        table.add_row(*cells)
    console.print(table)
    for note in section.notes:
        console.print(note, soft_wrap=True)


def make_parser() -> Parser:
    parser = Parser(prog="bench", description="Measures, prints a table and writes it into the page of benchmarks.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="benchmark", parser_class=Parser)
    shared = Parser(add_help=False)
    shared.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks.md"), help="page whose part for this device is rewritten"
    )
    shared.add_argument("--json", action="store_true", help="print the result as one line of JSON, the rest on stderr")
    sittings.add_arguments(shared)

    def add(name: str, help: str, benchmark: Any, sections: Sequence[str]) -> None:
        command = commands.add_parser(name, parents=[shared], help=help)
        benchmark.add_arguments(command)
        command.set_defaults(benchmark=benchmark, sections=sections)

    for comparison in COMPARISONS:
        add(comparison.name, comparison.title, comparison, (comparison.name,))
    add("race", "whole processes: rlstable, Brax's PPO and others", race, race_page.NAMES)
    for module in (scaling, seeds, kernels, host):
        add(module.NAME, module.HELP, module, (module.NAME,))
    add(gpu.NAME, gpu.HELP, gpu, ())
    return parser


def measure(args: argparse.Namespace, console: Console) -> Sitting:
    """Runs one benchmark, writes the page after each of its measurements, and shows what was measured."""
    for name in args.sections:
        pages.cut(pages.read(args.out), name)  # before measuring: an error after it would cost minutes
    benchmark = prepared(args, console)
    sitting = sittings.opened(args, benchmark.newest())
    found: dict[str, Section] = {}
    device, packages = results.device(), versions()
    try:
        for section in benchmark.run(sitting):
            found[section.name] = section
            part = pages.device_part(section, device, packages) if section.cells else ""
            # The race of a platform is one sitting, on one machine.
            without = device["platform"] if args.benchmark is race else None
            page = pages.updated(pages.read(args.out), section, device["kind"], part, without)
            pages.write(args.out, page)
    finally:
        for section in (section for section in found.values() if section.cells):
            show(section, console)
            if args.json:
                row = {"benchmark": section.name, "device": device, "versions": packages, "rows": section.rows}
                print(json.dumps(row))
        if sitting.left_out:
            console.print(sittings.listed("left out for lack of time", sitting.left_out), soft_wrap=True)
    return sitting


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one benchmark or `gpu`; an error of the user or of a measurement is one line and exit code 2."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    console = Console(stderr=args.json, highlight=False)
    try:
        if args.benchmark is gpu:
            sitting = gpu.run(args, lambda words: prepared(parser.parse_args(words), console), console)
        else:
            sitting = measure(args, console)
        if sitting.failed:
            parser.error("; ".join(sitting.failed))
    except ConfigError as error:
        parser.error(str(error))
    return 0


def stop(*_: Any) -> NoReturn:
    """Ends on Ctrl-C and SIGTERM; later signals cannot interrupt stopping the processes and showing the table."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
