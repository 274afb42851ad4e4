"""State of a run on the host, which a checkpoint holds beside the training state, and what is due and drawn by it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax

from rlstable.compilation.host_keys import fold_in, keys_of_seed
from rlstable.config import ConfigError
from rlstable.supervise.incident import IncidentState
from rlstable.supervise.memory import MemoryPlan
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.return_watch import WatchState
from rlstable.supervise.tally import SignState, Tally

ROWS = 2000  # at the configured interval
_NO_ITERATION = 2**32 - 1  # no run has so many iterations


@dataclasses.dataclass
class HostState:
    """Counts and watchers of a seed on the host; saved with the training state. Rolled back iterations do not count."""

    iteration: int = 0  # iterations done
    step: int = 0  # environment steps trained; valid after the training state is donated
    episodes: int = 0  # training episodes that ended
    # Return of the last evaluation, or of the comparison that replaced it; None if every episode was aborted.
    last_return: float | None = None
    best_return: float | None = None  # of the best evaluation so far
    # If an earlier policy replaced the last one: its `iteration` and `step`, and after a collapse `fallen_return`.
    replaced: dict[str, Any] | None = None
    iterations_without_update: int = 0  # in a row without an accepted update
    healthy_needed: int = 0  # healthy iterations before a state counts as good again, after unhealthy ones
    pool_used: bool = False  # whether the pool of clean first states was used since its last refill
    elapsed: float = 0.0  # seconds of training, over all processes
    evaluated: float = 0.0  # seconds of evaluation, over all processes
    wandb_run_id: str | None = None  # of Weights & Biases, for a resume
    attempts: Attempts = dataclasses.field(default_factory=Attempts)
    plan: MemoryPlan = dataclasses.field(default_factory=MemoryPlan)
    incidents: IncidentState = dataclasses.field(default_factory=IncidentState)
    watch: WatchState = dataclasses.field(default_factory=WatchState)
    signs: SignState = dataclasses.field(default_factory=SignState)
    tally: Tally = dataclasses.field(default_factory=Tally)

    @property
    def logged_step(self) -> int:
        """Environment steps trained, rolled back steps included; never decreases."""
        return self.step + self.attempts.lost_steps

    @property
    def logged_iteration(self) -> int:
        """Iterations done, rolled back iterations included; never decreases. Number of the checkpoint of a state."""
        return self.iteration + self.attempts.lost_iterations

    def read(self, saved: dict[str, Any]) -> None:
        """Takes the host state of a checkpoint; a `ConfigError` if another version, with other fields, saved it."""
        kinds: dict[str, Any] = {"attempts": Attempts, "plan": MemoryPlan, "incidents": IncidentState, "tally": Tally}
        try:
            _require_fields(HostState, saved)
            for name, kind in kinds.items():
                _require_fields(kind, saved[name])
            parts = {name: kind(**saved[name]) for name, kind in kinds.items()}
            parts |= {"watch": WatchState.of(saved["watch"]), "signs": SignState.of(saved["signs"])}
            vars(self).update(saved | parts)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"resume: another version of rlstable saved the host state ({error}); resume with that version"
            ) from error


def _require_fields(kind: type, saved: dict[str, Any]) -> None:
    different = sorted({field.name for field in dataclasses.fields(kind)} ^ saved.keys())
    if different:
        raise ValueError(f"{kind.__name__} differs in {', '.join(different)}")


class Draw(enum.IntEnum):
    """Purposes of the draws between two iterations."""

    RESET = 0
    REFILL = 1
    CONVERSION = 2  # to another precision, or to a changed configuration
    PLAN = 3
    COMPARISON = 4
    RECORDING = 5


class SeedKeys:
    """Random keys of one seed for the draws outside of the training program, by its seed and its host state."""

    def __init__(self, seed: int, host: HostState):
        self._host = host
        self.init, self.resets, self._eval, self.rollback = keys_of_seed(seed)

    @property
    def evaluation(self) -> jax.Array:
        """For the evaluation after this iteration."""
        return fold_in(self._eval, self._host.iteration)

    @property
    def fresh_evaluation(self) -> jax.Array:
        """For episodes that no evaluation of training plays."""
        return fold_in(self._eval, _NO_ITERATION)

    @property
    def comparison(self) -> jax.Array:
        """For the comparison of the best policy with the present one after this iteration and attempt."""
        return fold_in(self.between(Draw.COMPARISON), self._host.attempts.count)

    def between(self, draw: Draw) -> jax.Array:
        """For a draw between two iterations."""
        key = fold_in(self.rollback, self._host.iteration)
        return key if draw is Draw.RESET else fold_in(key, draw)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Decides when a seed logs, evaluates, resets and refills, by trained steps and iterations, never by the clock."""

    host: HostState
    total_steps: int
    iteration_steps: int  # environment steps of an iteration
    evaluations: int  # in the whole run
    recorded_every: int  # evaluations, 0 for no recording
    resets_per_evaluation: int  # Brax's `num_resets_per_eval`
    refilled_every: int  # iterations, 0 for never
    copied_every: int  # iterations
    logged_every: int  # iterations

    @property
    def finished(self) -> bool:
        return self.host.step >= self.total_steps

    @property
    def evaluates(self) -> bool:
        """Whether the rest of the run has an evaluation."""
        return self._crossed(self.host.step, self.total_steps, self.evaluations)

    @property
    def evaluates_next(self) -> bool:
        """Whether an evaluation is due after the next iteration, if its state is good."""
        step = self.host.step
        return self._crossed(step, step + self.iteration_steps, self.evaluations)

    def records(self, before: int, after: int) -> bool:
        """Whether a recording is due after an iteration between two steps, if its state is good."""
        every = self.recorded_every
        return every > 0 and self._crossed(before, after, self.evaluations, every)

    def resets(self, before: int) -> bool:
        """Whether a reset is due after this iteration, which began at `before`."""
        return self._crossed(before, self.host.step, max(self.evaluations, 1) * self.resets_per_evaluation)

    @property
    def refills(self) -> bool:
        """Whether to refill the pool of clean first states, if the run has drawn from it."""
        every = self.refilled_every
        return self.host.pool_used and every > 0 and self.host.iteration % every == 0

    @property
    def copies(self) -> bool:
        """Whether a copy of the state is due after this iteration, if the state is good: four in a short run."""
        iterations = -(-self.total_steps // self.iteration_steps)
        every = min(self.copied_every, max(iterations // 4, 1))
        return self.host.iteration % every == 0

    @property
    def logs(self) -> bool:
        """Whether a row is due after this iteration, with or without an evaluation.

        After `ROWS` rows the interval doubles, and again whenever the run has doubled, so that files of long runs stay
        small.
        """
        every = self.logged_every
        doublings = max(self.host.iteration - 1, 0) // (every * ROWS)
        return self.host.iteration % (every << doublings.bit_length()) == 0

    def _crossed(self, before: int, after: int, times: int, every: int = 1) -> bool:
        """Whether one of `times` equal parts of the run ended between two steps; of the parts, only each `every`th."""
        total = self.total_steps
        return min(after, total) * times // (total * every) > min(before, total) * times // (total * every)
