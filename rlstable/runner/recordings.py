"""Records episodes of the current policies while a run trains, as pages in `<run>/episodes`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlstable.device.precision import Level
from rlstable.io.files import one_line, subfolder, write_atomically
from rlstable.policy.evaluator import PolicySnapshot
from rlstable.render.page import page
from rlstable.render.recording import EpisodeRecorder, RecordedEpisodes
from rlstable.runner.seed_run import SeedRun


class Recordings:
    """Records an episode of every seed after every `render.every`th evaluation.

    The keys are separate, so the training computes the same numbers with and without recordings. After an error nothing
    more is recorded: the error is one event, and training continues.
    """

    def __init__(self) -> None:
        self._recorders: dict[Level, EpisodeRecorder] = {}
        self._failed = False

    def prepare(self, runs: Iterable[SeedRun]) -> None:
        """Compiles the program before an iteration after which a recording is due.

        Between the iteration and the steps due after it, a signal during the compilation could not save the state.

        Args:
            runs: The seeds that the next iteration trains.
        """
        for run in runs:
            if run.schedule.records_next and not self._failed:
                with self._reporting(run):
                    self._of(run).prepare(*self._policy(run))

    def record(self, runs: Iterable[SeedRun]) -> None:
        """Records the present policies of the seeds for which a recording is due.

        Args:
            runs: Seeds that have just been evaluated.
        """
        for run in runs:
            if run.records and not self._failed:
                with self._reporting(run):
                    self._record(run)

    def _of(self, run: SeedRun) -> EpisodeRecorder:
        """The recorder of all seeds at a precision level."""
        level = run.programs.level
        if level not in self._recorders:
            self._recorders[level] = run.programs.recorder()
        return self._recorders[level]

    def _policy(self, run: SeedRun) -> PolicySnapshot:
        return run.policy_snapshot._replace(key=run.keys.recording)

    def _record(self, run: SeedRun) -> None:
        recorded = self._of(run).record(*self._policy(run), run.host.step)
        step, folder, logbook = run.host.step, run.run_dir / "episodes", run.log.logbook
        (episode,) = recorded.recordings
        run.event("episode_recorded", file=f"episodes/{step}.html", **{"return": episode.total})
        logbook.run_after_rows(functools.partial(self._write_page, run, recorded, folder / f"{step}.html"))

    def _write_page(self, run: SeedRun, recorded: RecordedEpisodes, path: Path) -> None:
        with self._reporting(run):
            if run.log.logbook.in_place:
                write_atomically(subfolder(run.run_dir, path.parent.name) / path.name, page(recorded))

    @contextlib.contextmanager
    def _reporting(self, run: SeedRun) -> Iterator[None]:
        """Context manager: an error ends the recordings, but not the run."""
        try:
            yield
        except Exception as error:
            self._failed = True
            run.event("recording_failed", error=one_line(error), next="no further recordings")
