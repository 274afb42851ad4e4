"""Races whole processes as a user starts them: rlstable, and the PPO of Brax, SB3, SBX and RSL-RL.

python -m scripts.bench race --minutes 90                             # a new sitting: the README's rows first
python -m scripts.bench race                                          # the rest of the newest sitting; hours
python -m scripts.bench race --task ant --side ours --side brax       # some tasks, some sides
python -m scripts.bench race --measure threshold --rounds 5

Every leg is a line of docs/race.jsonl when it ends. A sitting does not run a leg again that has a line of this sitting,
of these versions and settings. To measure a leg again, delete its line.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from scripts import arguments, results, sittings
from scripts.pages import Section
from scripts.process import pins, python_of
from scripts.race import page, readme, tasks
from scripts.race.legs import ON_GPU, Leg, OutOfTime, Workshop
from scripts.race.page import Results
from scripts.race.tasks import RIVALS, SIDES
from scripts.results import Row
from scripts.sittings import Sitting

MEASURES = ("start", "threshold")
VENVS = Path(".rivals")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, choices in (("--task", tasks.TASKS), ("--side", SIDES), ("--measure", MEASURES)):
        arguments.add_choice(parser, name, choices)
    parser.add_argument("--rounds", type=arguments.whole(1), default=3, help="processes per leg; default: 3")
    parser.add_argument("--page", action="store_true", help="write the page from the results and run nothing")
    parser.add_argument("--results", type=Path, default=Path("docs/race.jsonl"), help="file that legs are added to")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="page with the table of costs")


@functools.cache
def versions(side: str) -> dict[str, str]:
    return {"python": platform.python_version(), **pins(side)} if side in RIVALS else results.versions()


def identity(leg: Leg, kind: str) -> Row:
    """Returns the values that a leg's rows of all rounds have in common on a kind of device."""
    fixed = {name: getattr(leg, name) for name in ("measure", "task", "side", "case", "warm", "threshold")}
    common = {**fixed, "kind": kind, "settings": leg.text, "versions": versions(leg.side)}
    return common | ({"recipe": recipe(leg)} if leg.side == "ours" else {})


@functools.cache
def recipe(leg: Leg) -> str:
    """Returns a digest of the PPO and network settings of our leg, so that another recipe is another measurement."""
    config = compose(list(leg.settings))
    chosen = {"ppo": config.ppo.model_dump(mode="json"), "network": config.network.model_dump(mode="json")}
    return hashlib.blake2s(json.dumps(chosen, sort_keys=True).encode(), digest_size=4).hexdigest()


def measured(rows: Sequence[Row], leg: Leg, kind: str, sitting: str | None) -> dict[int, Row]:
    """Returns a leg's rows of a sitting by round, without rows that reached a shorter time limit than the leg's."""
    own = results.matching(rows, **identity(leg, kind), sitting=sitting)
    return {row["round"]: row for row in own if tasks.is_whole(row, leg.limit)}


def expected(rows: Sequence[Row], leg: Leg, device: Row) -> float:
    """Returns the seconds that a leg took before, on this kind of device or else this platform; 0 if unknown."""
    fixed = {name: getattr(leg, name) for name in ("measure", "task", "side", "case", "warm")}
    own = [row for row in results.matching(rows, **fixed) if row["device"]["platform"] == device["platform"]]
    own = results.matching(own, kind=device["kind"]) or own
    took = [float(row.get("took") or row.get("ran") or 0.0) for row in own]
    return statistics.median(took) if took else 0.0


def asked_for(every: Sequence[Leg], args: argparse.Namespace) -> list[Leg]:
    """Returns the legs that the command line selects; raises ConfigError if there are none."""
    measures = [*(args.measure or MEASURES), *(["floor"] if "start" in (args.measure or MEASURES) else [])]
    chosen = [
        leg
        for leg in every
        if leg.task in (args.task or tasks.TASKS) and leg.side in (args.side or SIDES) and leg.measure in measures
    ]
    if not chosen:
        raise ConfigError("race: no leg has that task, side and measure")
    return chosen


def in_turn(chosen: Sequence[Leg], rounds: int) -> Iterator[tuple[int, Leg]]:
    """Yields all rounds of the README's task, then the others round by round, task by task.

    Every round starts with another leg of the task.
    """
    groups: dict[tuple[bool, str], list[Leg]] = {}
    for leg in chosen:
        groups.setdefault((leg.measure == "threshold", leg.task), []).append(leg)
    first = [own for group, own in groups.items() if group == (True, tasks.FIRST)]
    others = [own for group, own in groups.items() if group != (True, tasks.FIRST)]
    for several in (first, others):
        for number in range(1, rounds + 1):
            for own in several:
                shift = (number - 1) % len(own)
                yield from ((number, leg) for leg in own[shift:] + own[:shift])


def summary(row: Row) -> str:
    if row["measure"] == "floor":
        return f"{row['floor_sps']:,.0f} steps/s at most"
    if row["measure"] == "start":
        rate = "" if row["steady_sps"] is None else f", then {row['steady_sps']:,.0f} steps/s"
        return f"{row['ending']}; first iteration after {row['first']} s{rate}"
    return f"{row['ending']} after {row['seconds'] or row['ran']} s, {row['steps']:,} steps"


class Race:
    """The legs that a command line selects, and the rows of this kind of device.

    Args:
        args: The command line.

    Attributes:
        device: The device.
    """

    def __init__(self, args: argparse.Namespace):
        self.device = results.device()
        self._args = args
        self._rows = results.read(args.results)
        self._every = tasks.legs(self.device["platform"] == "cpu")
        self._chosen = asked_for(self._every, args)
        self._broken: list[Leg] = []  # legs that ended with an error, which further rounds leave out

    def newest(self) -> str | None:
        """Returns the sitting that a race without a time limit continues."""
        return sittings.newest(self._rows, self.device["kind"])

    def missing(self, sitting: str) -> list[str]:
        """Returns the names of the chosen legs that a sitting has not measured."""
        return [_name(number, leg) for number, leg in self._missing(sitting)]

    def results(self, sitting: str | None) -> Results:
        kind = self.device["kind"]
        return [(leg, list(measured(self._rows, leg, kind, sitting).values())) for leg in self._every]

    def run(self, sitting: Sitting) -> Iterator[Section]:
        """Runs the missing legs, one process at a time, and yields the sections of the page after each."""
        results.check_writable(self._args.results)
        if self._args.page:
            yield from self._sections(self.newest())
            return
        missing, ran = self._with_environments(self._missing(sitting.name), sitting), False
        on_gpu = self.device["platform"] == "gpu"
        with contextlib.closing(Workshop(VENVS, on_gpu, lambda: sitting.remaining)) as workshop:
            for number, leg in missing:
                if leg not in self._broken and sitting.fits(_name(number, leg), expected(self._rows, leg, self.device)):
                    ran = True
                    yield from self._run(number, leg, workshop, sitting)
        if not ran:
            yield from self._sections(sitting.name)

    def _missing(self, sitting: str) -> list[tuple[int, Leg]]:
        done = {id(leg): measured(self._rows, leg, self.device["kind"], sitting) for leg in self._chosen}
        turns = in_turn(self._chosen, self._args.rounds)
        return [(number, leg) for number, leg in turns if number not in done[id(leg)]]

    def _with_environments(self, missing: list[tuple[int, Leg]], sitting: Sitting) -> list[tuple[int, Leg]]:
        """Makes the rivals' environments, and returns the legs without those whose environment cannot be made."""
        for side in dict.fromkeys(leg.side for _, leg in missing if leg.side in RIVALS):
            try:
                python_of(side, VENVS, self.device["platform"] == "gpu" and side in ON_GPU)
            except ConfigError as error:
                _fail(sitting, str(error))
                missing = [(number, leg) for number, leg in missing if leg.side != side]
        return missing

    def _run(self, number: int, leg: Leg, workshop: Workshop, sitting: Sitting) -> Iterator[Section]:
        started = sittings.now()
        try:
            found = workshop.run(leg, number)
        except OutOfTime:
            sitting.left_out.append(_name(number, leg))
            return
        except ConfigError as error:
            _fail(sitting, str(error))
            self._broken.append(leg)
            return
        about = {"sitting": sitting.name, "round": number, "limit": leg.limit, "device": self.device}
        about |= {"commit": results.commit(), "took": round(sittings.now() - started, 2)}
        row = {**identity(leg, self.device["kind"]), **about, **found}
        results.add(self._args.results, [row])
        self._rows.append(row)
        print(f"{_name(number, leg)}: {summary(row)}", file=sys.stderr, flush=True)
        yield from self._sections(sitting.name)

    def _sections(self, sitting: str | None) -> list[Section]:
        readme.write(self._args.readme, self._rows)
        return page.sections(self.results(sitting), self.device["kind"], self._args.out.parent)


def _name(number: int, leg: Leg) -> str:
    return f"round {number}: {leg}"


def _fail(sitting: Sitting, message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    sitting.failed.append(message)
