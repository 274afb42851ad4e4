"""The run folder: with several seeds it has rows, events and a result of all seeds, and one folder per seed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlstable.config import Config, ConfigError
from rlstable.io.console import Console, SeedConsole
from rlstable.io.lock import RunLock
from rlstable.io.logbook import Logbook
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import (
    forget_result,
    free_reserve,
    has_checkpoint,
    open_run_dir,
    read_result,
    seed_folder,
    seed_folders,
    seed_of,
    write_first_files,
)
from rlstable.report.run_record import last_row
from rlstable.runner.aggregate import Fields, RowsOfSeeds, fields_of
from rlstable.runner.finish import finish_files
from rlstable.runner.live_page import LivePage
from rlstable.runner.result import Result, Row
from rlstable.runner.seed_log import Callback
from rlstable.runner.seed_run import SeedRun
from rlstable.supervise.stop_reasons import FROM_OUTSIDE, StopReason, stays_ended

_OPEN_FILES = 3  # of each seed: lock, rows and events
_OTHER_FILES = 100  # of libraries and of all seeds together

# Opens a seed from its configuration, folder, callback and console.
OpenSeed = Callable[[Config, Path, Callback | None, Console], SeedRun]


class SingleFolder:
    """Folder of a run with one seed, which the seed itself writes.

    Args:
        config: The whole configuration.
        run_dir: The run folder.
        callback: Called as `callback(step, row)` with every row; returning True stops the run.
        console: The console.
    """

    def __init__(self, config: Config, run_dir: Path, callback: Callback | None, console: Console):
        self._config = config
        self._run_dir = run_dir
        self._callback = callback
        self._console = console
        self.results: dict[int, Result] = {}

    def open(self, open_seed: OpenSeed) -> dict[int, SeedRun]:
        """Opens every unfinished seed.

        Raises:
            ConfigError: The folder is unusable.
        """
        return {self._config.seed: open_seed(self._config, self._run_dir, self._callback, self._console)}

    def event(self, kind: str, **fields: Any) -> None:
        """Logs an event of the whole run; here the seed logs it."""

    def wait(self) -> None:
        """Waits until the rows and events of the whole run are written; seeds are saved after them."""

    def row(self, training: Mapping[int, SeedRun], unfinished: Iterable[SeedRun], is_last: bool) -> bool:
        """Logs a row of all seeds if it is complete; here the seed has logged it.

        Args:
            training: The seeds that the last iteration trained.
            unfinished: All seeds that have not ended.
            is_last: Whether this is the last row.

        Returns:
            Whether the callback asks the run to stop.
        """
        return False

    def end_seed(self, seed: int, run: SeedRun, stop_reason: StopReason) -> None:
        """Ends one seed and records its result."""
        _, self.results[seed] = run.finish(stop_reason)

    def finish(self, stop_reason: StopReason | None, advice: str | None) -> Result:
        """Ends the run after all its seeds.

        Args:
            stop_reason: Stop reason of the whole run; None if each seed has its own.
            advice: Advice on the stop reason; None if there is none.
        """
        (result,) = self.results.values()
        return result

    def close(self) -> None:
        """Releases the folder; may be called again."""


class FleetFolder(SingleFolder):
    """Folder of a run with several seeds: a folder per seed, and rows, events and a result of all seeds together.

    Raises:
        ConfigError: The folder is unusable.
    """

    def __init__(self, config: Config, run_dir: Path, callback: Callback | None, console: Console):
        super().__init__(config, run_dir, callback, console)
        self.history: list[Row] = []
        self._fields: dict[int, Fields] = {}
        self._rows = RowsOfSeeds()
        self._last_evaluation: Row = {}
        self._step = 0
        self._live_page = LivePage(run_dir, lambda: self._logbook.in_place)
        pages = [self._live_page] if config.logging.report else []
        self._logbook = Logbook(_without_wandb(config), run_dir, console, pages)
        self._lock: RunLock | None = None

    def open(self, open_seed: OpenSeed) -> dict[int, SeedRun]:
        """Opens every unfinished seed, and the files of all seeds together."""
        config, seeds = self._config, {}
        _require_open_files(config.seeds)
        resumes, self._lock = open_run_dir(self._run_dir, config.resume, config.seeds)
        try:
            if resumes:
                self._require_the_same_seeds()
            shown: set[str] = set()
            group = "/".join(self._run_dir.absolute().parts[-2:])
            for seed in config.each_seed:
                folder = seed_folder(self._run_dir, seed)
                if resumes:
                    self._rows.set_last(seed, last_row(folder))
                    fields = read_result(folder)
                    if fields is not None and stays_ended(fields, config):
                        # The wall time is of another process.
                        self._fields[seed] = {key: value for key, value in fields.items() if key != "wall_seconds"}
                        stop_reason, value = StopReason[fields["stop_reason"]], outcome_of(fields).value
                        self.results[seed] = Result(stop_reason, folder, fields["step"], {}, [], policy_return=value)
                        continue
                console = SeedConsole(self._console, seed, shown)
                seeds[seed] = open_seed(
                    config.of_seed(seed, group), folder, functools.partial(self._rows.add, seed), console
                )
            self._open_files(list(seeds.values()))
        except BaseException:
            for run in seeds.values():
                run.close()
            self.close()
            for folder in seed_folders(self._run_dir):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # only empty folders: a failed start leaves nothing behind
            raise
        return seeds

    def event(self, kind: str, **fields: Any) -> None:
        """Logs an event of the whole run."""
        self._logbook.event(self._step, kind, fields)

    def wait(self) -> None:
        """Waits until the rows and events of the whole run are written."""
        self._logbook.wait()

    def row(self, training: Mapping[int, SeedRun], unfinished: Iterable[SeedRun], is_last: bool) -> bool:
        """Logs a row of all seeds, once every training seed has logged its row."""
        forget_result(self._run_dir)
        unfinished = list(unfinished)
        self._step = max(self._step, min((run.host.logged_step for run in unfinished), default=0))
        returns = [fields.get("last_return", fields["return"]) for fields in self._fields.values()]
        row = self._rows.combine(training, [*returns, *(run.host.last_return for run in unfinished)], is_last)
        if row is None:
            return False
        if "eval/episode_reward" in row:
            self._last_evaluation = {key: row[key] for key in row if key.startswith(("eval/", "seeds/"))}
        self._logbook.log(self._step, row)
        self.history.append({"step": self._step, **row})
        return self._callback is not None and self._callback(self._step, row) is True

    def end_seed(self, seed: int, run: SeedRun, stop_reason: StopReason) -> None:
        """Ends one seed; the other seeds continue."""
        self._step = max(self._step, run.host.logged_step)
        self._fields[seed], self.results[seed] = run.finish(stop_reason)
        stop_reason = self.results[seed].stop_reason
        failed = not stop_reason.succeeded and stop_reason not in FROM_OUTSIDE
        self.event("seed_given_up" if failed else "seed_ended", seed=seed, stop_reason=stop_reason.name)

    def finish(self, stop_reason: StopReason | None, advice: str | None) -> Result:
        """Ends the run after all its seeds."""
        with contextlib.closing(self):
            fields = fields_of(self._fields, stop_reason)
            if advice is not None:
                fields["advice"] = advice
            self.event("stopped", **fields)
            self._live_page.stop()
            stop_reason = StopReason[fields["stop_reason"]]
            saved = any(map(has_checkpoint, seed_folders(self._run_dir)))
            report = self._config.logging.report
            by_name = self._config.env.source != "object"
            options = {"report": report, "saved": saved, "env_by_name": by_name, "gone": not self._logbook.in_place}
            finish_files(stop_reason, fields, self._run_dir, self._console, **options)
            results = tuple(self.results[seed] for seed in self._config.each_seed if seed in self.results)
            numbers = (self._step, self._last_evaluation, self.history, results, fields["return"])
            return Result(stop_reason, self._run_dir, *numbers)

    def close(self) -> None:
        """Releases the folder; may be called again."""
        if self._logbook.in_place:
            free_reserve(self._run_dir)
        self._logbook.close()
        if self._lock is not None:
            self._lock.release()

    def _open_files(self, seeds: list[SeedRun]) -> None:
        machine = seeds[0].programs.machine if seeds else None
        write_first_files(self._run_dir, self._config.model_dump(mode="json"), machine)
        steps = [run.host.logged_step for run in seeds]
        self._step = max(steps, default=0)
        # Some seeds may repeat iterations that are logged already; the repeated rows are the same.
        self._logbook.start(None, max(steps) if steps and self._config.resume is not None else None)

    def _require_the_same_seeds(self) -> None:
        """Checks that the configuration has every saved seed.

        Raises:
            ConfigError: A saved seed is missing.
        """
        saved = [seed_of(folder) for folder in seed_folders(self._run_dir) if has_checkpoint(folder)]
        if not set(saved) <= set(self._config.each_seed):
            raise ConfigError(
                f"seeds: {self._run_dir} holds seeds {min(saved)} to {max(saved)}, and the configured seeds from "
                f"{self._config.seed} on lack some; set seed={min(saved)} seeds={max(saved) - min(saved) + 1}, or more"
            )


def _require_open_files(seeds: int) -> None:
    """Checks that the process may open the files of all seeds.

    Raises:
        ConfigError: It may not.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (limit - _OTHER_FILES) // _OPEN_FILES
    if limit != resource.RLIM_INFINITY and seeds > most:
        raise ConfigError(
            f"seeds: {seeds} seeds keep {seeds * _OPEN_FILES} files open, and this process may open {limit}; train at "
            f"most {most} seeds at once, or raise the limit with ulimit -n"
        )


def _without_wandb(config: Config) -> Config:
    """The configuration for the rows of all seeds: Weights & Biases receives the rows of each seed, as a group."""
    wandb = config.logging.wandb.model_copy(update={"mode": "disabled"})
    return config.model_copy(update={"logging": config.logging.model_copy(update={"wandb": wandb})})
