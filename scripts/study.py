"""Studies: trains the seeds that a file of results lacks, cell by cell, and adds a row for each seed."""

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlstable.config import ConfigError
from rlstable.supervise.stop_reasons import FROM_OUTSIDE
from scripts import results
from scripts.process import ROOT, Outcome, environment, watch
from scripts.results import Row


class Cell(NamedTuple):
    """Seeds that are trained in one way."""

    name: str  # its name in printed lines
    about: Row  # fields that the rows of the cell have in common, and no other rows
    seeds: range
    train: Callable[[range], Iterable[Row]]  # trains seeds, and yields a row of each as soon as it can be saved


@dataclasses.dataclass(frozen=True)
class Run:
    """A seed whose training has ended."""

    seed: int
    folder: Path  # its run folder

    @property
    def result(self) -> Row:
        return dict(json.loads((self.folder / "result.json").read_text()))

    @property
    def metrics(self) -> list[Row]:
        return results.read(self.folder / "metrics.jsonl")

    def events(self, kind: str) -> int:
        """Returns the number of events of a kind."""
        return len(results.matching(results.read(self.folder / "events.jsonl"), kind=kind))

    def curve(self) -> Row:
        """Returns the steps and the returns of all evaluations; raises `ConfigError` without one."""
        evaluated = [row for row in self.metrics if "eval/episode_reward" in row]
        if not evaluated:
            raise ConfigError(f"seed {self.seed} ended before its first evaluation: {self.result['stop_reason']}")
        return {name: [row[key] for row in evaluated] for name, key in _CURVE.items()}


_CURVE = {"steps": "step", "returns": "eval/episode_reward"}


@contextlib.contextmanager
def trained(overrides: Sequence[str], seeds: range) -> Iterator[tuple[list[Run], Outcome]]:
    """Trains all seeds by the plain command, in one process and a temporary folder.

    Raises:
        ConfigError: A seed has no result, or a signal stopped it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        own = (f"seed={seeds.start}", f"seeds={len(seeds)}", f"hydra.run.dir={folder}")
        command = [sys.executable, "-m", "rlstable.train", *overrides, *own]
        done = watch(command, environment(PYTHONPATH=str(ROOT)))
        runs = [Run(seed, folder / f"seed-{seed}" if len(seeds) > 1 else folder) for seed in seeds]
        stopped = {reason.name for reason in FROM_OUTSIDE}
        if any(not (run.folder / "result.json").exists() or run.result["stop_reason"] in stopped for run in runs):
            raise ConfigError(f"exit code {done.code}, {done.last_line or 'no output'}")
        yield runs, done


def missing(rows: Sequence[Row], cell: Cell) -> range:
    """Returns the seeds of a cell from the first one without a row on."""
    known = {seed for row in results.matching(rows, **cell.about) for seed in row.get("seeds", [row.get("seed")])}
    seeds = cell.seeds
    return range(next((seed for seed in seeds if seed not in known), seeds.stop), seeds.stop)


def run(asked: Namespace, cells: Iterable[Cell], write_page: Callable[[Sequence[Row], Path], None]) -> None:
    """Trains the seeds that each cell lacks, adds their rows to the file, prints a line per cell, and writes the page.

    A cell that fails is printed, and ends the command with an error after all other cells.
    """
    failed = 0
    for cell in () if asked.page else cells:
        started = time.perf_counter()
        try:
            if seeds := missing(results.read(asked.out), cell):
                about, returns = results.provenance(), []
                for row in cell.train(seeds):
                    results.add(asked.out, [{**cell.about, **row, **about}])
                    value = row["return"] if "return" in row else row["returns"][-1]
                    returns.append("nan" if value is None else f"{value:,.4g}")
                print(f"{cell.name:40} {', '.join(returns)} ({time.perf_counter() - started:.0f} s)", flush=True)
        except ConfigError as error:
            failed += 1
            print(f"{cell.name}: {error}", file=sys.stderr, flush=True)
    write_page(results.read(asked.out), asked.out)
    if failed:
        sys.exit(f"{failed} cells failed; run the command again to retry them")
