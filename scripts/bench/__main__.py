"""Measures rlstable beside the PPO of Brax, SB3 and SBX, as whole processes in turn, and guards on and off.

python -m scripts.bench --only threshold --only start --minutes 90 --new    # a new sitting: the README's table first
python -m scripts.bench --only guards --task humanoid                       # what guards cost
python -m scripts.bench --gpu --minutes 60                                  # a GPU, most telling first
python -m scripts.bench                                                     # the rest of the newest sitting; hours
python -m scripts.bench --page                                              # the pages from the results

Every finished process is a line of docs/bench.jsonl. A sitting is one machine in one go: it does not measure a line
again that it has. The benchmark can be stopped at any time; a process that --minutes cuts off leaves no line.
"""

import datetime
import functools
import itertools
import math
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlstable.config import ConfigError
from scripts import process, results
from scripts.bench import leg as legs
from scripts.bench import page, tasks
from scripts.bench.leg import Leg
from scripts.results import Row


@functools.cache
def versions(side: str) -> dict[str, str]:
    return results.versions() if side == "ours" else process.versions(side)


def identity(leg: Leg, kind: str) -> Row:
    """Returns the values that a leg's rows of all rounds have in common on a kind of device."""
    fixed = {name: getattr(leg, name) for name in ("measure", "task", "side", "case", "warm", "threshold")}
    return {**fixed, "kind": kind, "settings": leg.text, "versions": versions(leg.side)}


def in_turn(groups: Sequence[Sequence[Leg]], rounds: int) -> Iterator[tuple[int, Leg]]:
    """Yields all rounds of the first group, then the other groups round by round.

    Every round of a group starts with another leg. Guards have one round, which times many pairs.
    """
    for several in (groups[:1], groups[1:]):
        for number, own in itertools.product(range(1, rounds + 1), several):
            shift = (number - 1) % max(len(own), 1)
            for leg in (*own[shift:], *own[:shift]):
                if number == 1 or leg.measure != "guards":
                    yield number, leg


def asked_for(args: Namespace, on_cpu: bool) -> list[tuple[int, Leg]]:
    only, task, side = args.only or tasks.MEASURES, args.task or tasks.TASKS, args.side or tasks.SIDES
    every = in_turn(tasks.legs(on_cpu), args.rounds)
    chosen = [(n, leg) for n, leg in every if leg.measure in only and leg.task in task and leg.side in side]
    if not chosen:
        raise ConfigError("no measurement has that measure, task and side on this device")
    return chosen


def sitting_of(args: Namespace, rows: Sequence[Row], kind: str) -> str:
    """Returns the start, in UTC, of the newest sitting on a kind of device, or of a new one."""
    names = [row["sitting"] for row in results.matching(rows, kind=kind) if row.get("sitting")]
    if names and not args.new:
        return str(max(names))
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def run(args: Namespace, device: Row) -> tuple[list[str], list[str]]:
    """Measures what the sitting lacks, and returns what did not fit into the time and what failed."""
    rows, kind = results.read(args.out), device["kind"]
    end = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    sitting, failed, broken = sitting_of(args, rows, kind), [], set()
    missing = [
        (number, leg)
        for number, leg in asked_for(args, device["platform"] == "cpu")
        if not results.matching(rows, **identity(leg, kind), sitting=sitting, round=number)
    ]
    for index, (number, leg) in enumerate(missing):
        if broken & {leg.side, str(leg)}:
            continue
        try:
            found = legs.run(leg, number, end)
        except legs.OutOfTime:
            return [f"round {number}: {leg}" for number, leg in missing[index:]], failed
        except ConfigError as error:
            failed.append(str(error))
            broken.add(str(leg) if leg.side == "ours" else leg.side)
            continue
        about = {"sitting": sitting, "round": number, "device": device, "commit": results.commit()}
        rows.append({**identity(leg, kind), **about, **found})
        results.add(args.out, rows[-1:])
        page.write(rows, args.out.parent / "benchmarks.md", args.readme)
        shown = {key: value for key, value in found.items() if key not in ("curve", "limit", "trips")}
        print(f"round {number}: {leg}: {', '.join(f'{key} {value}' for key, value in shown.items())}", flush=True)
    return [], failed


def main(argv: Sequence[str] | None = None) -> None:
    choices = {"only": tasks.MEASURES, "task": tasks.TASKS, "side": tasks.SIDES}
    parser = results.study_parser(__doc__, Path("docs/bench.jsonl"), **choices)
    parser.add_argument("--rounds", type=int, default=3, help="processes per side; default: 3")
    parser.add_argument("--minutes", type=float, help="time for all; default: no limit")
    parser.add_argument("--new", action="store_true", help="start a new sitting instead of continuing the newest")
    parser.add_argument("--gpu", action="store_true", help="an error without a GPU")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="page with the table of costs")
    args = parser.parse_args(argv)
    try:
        if args.page:
            return page.write(results.read(args.out), args.out.parent / "benchmarks.md", args.readme)
        device = results.device()
        if args.gpu and device["platform"] != "gpu":
            raise ConfigError("jax finds no GPU here; nvidia-smi says whether there is a driver")
        left_out, failed = run(args, device)
    except ConfigError as error:
        sys.exit(f"bench: {error}")
    if left_out:
        print(f"left out for lack of time: {'; '.join(left_out)}")
    if failed:
        sys.exit(f"bench: {'; '.join(failed)}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the process that is measured ends, too
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
