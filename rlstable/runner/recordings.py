"""Records episodes of the current policies while a run trains, as pages in `<run>/episodes`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlstable.io.files import one_line, subfolder, write_atomically
from rlstable.policy.evaluator import PolicySnapshot
from rlstable.render.page import page
from rlstable.render.recording import RecordedEpisodes
from rlstable.runner.seed import Seed


class Recordings:
    """Records an episode of every seed after every `render.every`th evaluation.

    The keys are separate, so the training computes the same numbers with and without recordings. After an error nothing
    more is recorded: the error is one event, and training continues.
    """

    def __init__(self) -> None:
        self._failed = False

    def prepare(self, seeds: Iterable[Seed]) -> None:
        """Compiles the program before an iteration of these seeds after which a recording is due.

        Between the iteration and the steps due after it, a signal during the compilation could not save the state.
        """
        for seed in seeds:
            step = seed.host.step
            if seed.schedule.records(step, step + seed.config.env_steps_per_iteration) and not self._failed:
                with self._reporting(seed):
                    seed.programs.recorder(seed.host).prepare(*_policy(seed))

    def record(self, seeds: Iterable[Seed]) -> None:
        """Records the present policies of those seeds, which have just been evaluated, for which that is due."""
        for seed in seeds:
            if seed.schedule.records(seed.step_before, seed.host.step) and not self._failed:
                with self._reporting(seed):
                    self._record(seed)

    def _record(self, seed: Seed) -> None:
        recorded = seed.programs.recorder(seed.host).record(*_policy(seed), seed.host.step)
        step, folder, logbook = seed.host.step, seed.run_dir / "episodes", seed.log.logbook
        (episode,) = recorded.recordings
        seed.event("episode_recorded", file=f"episodes/{step}.html", **{"return": episode.total})
        logbook.run_after_rows(functools.partial(self._write_page, seed, recorded, folder / f"{step}.html"))

    def _write_page(self, seed: Seed, recorded: RecordedEpisodes, path: Path) -> None:
        with self._reporting(seed):
            if seed.log.logbook.in_place:
                write_atomically(subfolder(seed.run_dir, path.parent.name) / path.name, page(recorded))

    @contextlib.contextmanager
    def _reporting(self, seed: Seed) -> Iterator[None]:
        """Context manager: an error ends the recordings, but not the run."""
        try:
            yield
        except Exception as error:
            self._failed = True
            seed.event("recording_failed", error=one_line(error), next="no further recordings")


def _policy(seed: Seed) -> PolicySnapshot:
    return seed.policy_snapshot._replace(key=seed.keys.recording)
