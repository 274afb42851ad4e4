"""Schedule of evaluations, resets and log rows, by trained steps and iterations, never by the clock."""

from __future__ import annotations

import dataclasses

from rlstable.config import Config


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Decides when a run evaluates, resets environments and refills the pool of first states.

    Attributes:
        config: The configuration.
    """

    config: Config

    def evaluates(self, before: int, after: int) -> bool:
        """Whether an evaluation is due after an iteration from one number of environment steps to another."""
        return self._crossed(before, after, self.config.eval.num_evals)

    def resets(self, before: int, after: int) -> bool:
        """Whether Brax's `num_resets_per_eval` then wants every environment reset."""
        per_evaluation = self.config.ppo.num_resets_per_eval
        return self._crossed(before, after, max(self.config.eval.num_evals, 1) * per_evaluation)

    def refills(self, iteration: int) -> bool:
        """Whether to refill the pool of clean first states after an iteration, if it was drawn from."""
        every = self.config.env.reset_pool_refresh
        return every > 0 and iteration % every == 0

    def logs(self, iteration: int) -> bool:
        """Whether a row is due after an iteration in any case."""
        return iteration % self.config.logging.log_every == 0

    def _crossed(self, before: int, after: int, times: int) -> bool:
        """Whether one of `times` equal parts of the run ended in between."""
        total = self.config.total_steps
        return min(after, total) * times // total > min(before, total) * times // total
