"""Runs a benchmark, prints its table and rewrites its section of docs/benchmarks.md for this kind of device.

python -m scripts.bench guards                             # cost of all default guards
python -m scripts.bench guards --env humanoid --pairs 60   # one environment, more pairs
python -m scripts.bench supervision                        # cost of a supervisor that has nothing to do
python -m scripts.bench physics                            # C MuJoCo beside MJX
python -m scripts.bench race                               # whole processes: rlstable, Brax's PPO, SB3, SBX, RSL-RL
python -m scripts.bench scaling                            # cost over environments, episode length, steps done
python -m scripts.bench seeds                              # several seeds in one program, beside one run per seed
python -m scripts.bench kernels                            # kernels of an iteration on the device
python -m scripts.bench host                               # the host's part of an iteration

The measurements stay in docs/bench.jsonl and docs/race.jsonl, so that one part can be measured alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from rlstable.config import ConfigError
from scripts import pages, results
from scripts.bench import host, kernels, scaling, seeds
from scripts.bench.comparisons import COMPARISONS
from scripts.pages import Section
from scripts.race import page as race_page
from scripts.race import race


class Parser(argparse.ArgumentParser):
    """Prints an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: {message}\n")


def versions() -> dict[str, str]:
    """Returns the versions that docs/bench.jsonl records."""
    return {"mjx" if name == "mujoco-mjx" else name: version for name, version in results.versions().items()}


def run_parts(args: argparse.Namespace, console: Console) -> Iterator[Section]:
    parts = args.benchmark.parts(args, console)
    return parts.run(args.task, args.out.parent / "bench.jsonl", results.device(), versions())


def run_race(args: argparse.Namespace, console: Console) -> list[Section]:
    legs, device = race.run(args)
    return race_page.sections(legs, device["kind"], args.out.parent)


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

    def add(name: str, help: str, benchmark: Any, sections: Sequence[str], run: Any) -> None:
        command = commands.add_parser(name, parents=[shared], help=help)
        benchmark.add_arguments(command)
        command.set_defaults(run=run, benchmark=benchmark, sections=sections)

    for comparison in COMPARISONS:
        add(comparison.name, comparison.title, comparison, (comparison.name,), run_parts)
    add("race", "whole processes: rlstable, Brax's PPO and others", race, race_page.NAMES, run_race)
    for module in (scaling, seeds, kernels, host):
        add(module.NAME, module.HELP, module, (module.NAME,), run_parts)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one benchmark; an error of the user is one line and exit code 2."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    console = Console(stderr=args.json, highlight=False)
    try:
        for name in args.sections:
            pages.cut(pages.read(args.out), name)  # before measuring: an error after it would cost minutes
        found: dict[str, Section] = {}
        for section in args.run(args, console):
            found[section.name] = section
            device, packages = results.device(), versions()
            part = pages.device_part(section, device, packages)
            pages.write(args.out, pages.updated(pages.read(args.out), section, device["kind"], part))
        for section in found.values():
            show(section, console)
            if args.json:
                row = {"benchmark": section.name, "device": device, "versions": packages, "rows": section.rows}
                print(json.dumps(row))
    except ConfigError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
