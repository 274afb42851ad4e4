"""A sitting: the measurements of one machine in one go, within a limit of time."""

import argparse
import dataclasses
import datetime
import math
import time
from collections.abc import Iterable

from scripts.arguments import positive
from scripts.results import Row


def now() -> float:
    """Returns the seconds of a clock that only runs forward."""
    return time.monotonic()


@dataclasses.dataclass
class Sitting:
    name: str  # start in UTC; the `sitting` of its rows
    end: float = math.inf  # end of the time, by `now`
    left_out: list[str] = dataclasses.field(default_factory=list)  # measurements that did not fit into the time
    failed: list[str] = dataclasses.field(default_factory=list)  # measurements that ended with an error

    @property
    def remaining(self) -> float:
        """Seconds until the end, negative after it; infinite without a limit."""
        return self.end - now()

    def fits(self, what: str, expected: float = 0.0) -> bool:
        """Returns whether a measurement of these seconds fits into the time, and records it as left out if not.

        Args:
            what: Name of the measurement.
            expected: Seconds that the measurement took before; 0 if unknown.
        """
        if self.remaining > expected:
            return True
        self.left_out.append(what)
        return False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=positive("minutes"), help="start a new sitting, which ends after this time; default: no limit"
    )
    parser.add_argument("--sitting", help="continue this sitting; skip what it has measured")


def opened(args: argparse.Namespace, newest: str | None) -> Sitting:
    """Returns the sitting of a command line: the one asked for, a new one with `--minutes`, or else the newest.

    Args:
        newest: The newest sitting that can be continued; None starts a new one.
    """
    name = args.sitting or (newest if args.minutes is None else None)
    end = math.inf if args.minutes is None else now() + 60 * args.minutes
    return Sitting(name or datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"), end)


def newest(rows: Iterable[Row], kind: str) -> str | None:
    """Returns the newest sitting on a kind of device; None if its rows are from the time before sittings."""
    names = [row.get("sitting") for row in rows if row["device"]["kind"] == kind]
    return max(filter(None, names), default=None)


def listed(what: str, names: Iterable[str]) -> str:
    """Returns names as one line, each name once; empty without names."""
    text = "; ".join(dict.fromkeys(names))
    return f"{what}: {text}" if text else ""
