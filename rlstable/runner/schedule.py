"""Schedule of evaluations, resets and log rows, by trained steps and iterations, never by the clock."""

from __future__ import annotations

import dataclasses

from rlstable.config import Config
from rlstable.runner.host_state import HostState

ROWS = 2000  # at the configured interval


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Decides when a run logs, evaluates, resets environments and refills the pool of first states.

    Attributes:
        config: The configuration.
        host: The run's host state.
    """

    config: Config
    host: HostState

    @property
    def finished(self) -> bool:
        """Whether all steps are trained."""
        return self.host.step >= self.config.total_steps

    @property
    def evaluates(self) -> bool:
        """Whether the rest of the run has an evaluation."""
        return self._crossed(self.host.step, self.config.total_steps, self.config.eval.num_evals)

    @property
    def evaluates_next(self) -> bool:
        """Whether an evaluation is due after the next iteration, if its state is good."""
        step = self.host.step
        return self._crossed(step, step + self.config.env_steps_per_iteration, self.config.eval.num_evals)

    def records(self, before: int) -> bool:
        """Whether an evaluation after this iteration is one whose policy is recorded.

        Args:
            before: Environment steps before this iteration.
        """
        return self._records(before, self.host.step)

    @property
    def records_next(self) -> bool:
        """Whether a recording is due after the next iteration, if its state is good."""
        return self._records(self.host.step, self.host.step + self.config.env_steps_per_iteration)

    def resets(self, before: int) -> bool:
        """Whether Brax's `num_resets_per_eval` asks for a reset of every environment.

        Args:
            before: Environment steps before this iteration.
        """
        per_evaluation = self.config.ppo.num_resets_per_eval
        return self._crossed(before, self.host.step, max(self.config.eval.num_evals, 1) * per_evaluation)

    @property
    def refills(self) -> bool:
        """Whether to refill the pool of clean first states, if the run has drawn from it."""
        every = self.config.env.reset_pool_refresh
        return self.host.pool_used and every > 0 and self.host.iteration % every == 0

    @property
    def logs(self) -> bool:
        """Whether a row is due after this iteration, with or without an evaluation.

        After `ROWS` rows the interval doubles, and again whenever the run has doubled, so that files of long runs stay
        small.
        """
        every = self.config.logging.log_every
        doublings = max(self.host.iteration - 1, 0) // (every * ROWS)
        return self.host.iteration % (every << doublings.bit_length()) == 0

    def _records(self, before: int, after: int) -> bool:
        every = self.config.render.every
        return every > 0 and self._crossed(before, after, self.config.eval.num_evals, every)

    def _crossed(self, before: int, after: int, times: int, every: int = 1) -> bool:
        """Whether one of `times` equal parts of the run ended between two steps; of the parts, only each `every`th."""
        total = self.config.total_steps
        return min(after, total) * times // (total * every) > min(before, total) * times // (total * every)
