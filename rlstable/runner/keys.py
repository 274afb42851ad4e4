"""Random keys of one seed for the draws outside the training program."""

from __future__ import annotations

import jax

from rlstable.compilation.host_keys import fold_in, keys_of_seed
from rlstable.runner.host_state import HostState

_NO_ITERATION = 2**32 - 1  # no run has so many iterations


class SeedKeys:
    """Random keys of one seed, each a function of the seed and of counts in the host state.

    Attributes:
        init: For parameters and for training.
        resets: For the first states of the environments.
        rollback: For resets after a rollback.

    Args:
        seed: The seed.
        host: The run's host state.
    """

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
        return fold_in(self.between(4), self._host.attempts.count)

    @property
    def recording(self) -> jax.Array:
        """For the episode that is recorded after this iteration."""
        return self.between(5)

    def between(self, purpose: int) -> jax.Array:
        """For a draw between two iterations; each purpose has a number."""
        key = fold_in(self.rollback, self._host.iteration)
        return fold_in(key, purpose) if purpose else key
