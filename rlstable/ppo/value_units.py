"""Units of the value network: with `ppo.normalize_values` it learns value targets of mean 0 and standard deviation 1.

The statistics of value targets are part of `Statistics`. When they move, the network's last layer is rescaled, so that
its value estimates stay the same (PopArt, van Hasselt et al. 2016, arXiv:1602.07714).
"""

from __future__ import annotations

import dataclasses

from rlstable.device.transforms import apply_if
from rlstable.guards import limiters
from rlstable.ppo import normalizer
from rlstable.ppo.gradient import LossGradient, preprocess_batch
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected

# Weight of an iteration's value targets in their statistics: targets grow with the policy, so old ones must fade.
_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class ValueUnits:
    """Statistics of value targets, for raw observations; without `ppo.normalize_values` both methods change nothing."""

    networks: Networks
    objective: LossGradient

    def before_sgd(self, params: Params, statistics: Statistics, data: Collected) -> Statistics:
        """Initialises the statistics of value targets from the first batch; later batches change nothing here.

        Initially values have unit 1 in every task. Without this step the value targets of the first iteration would
        have another magnitude, and the critic's gradient would dominate the policy's.
        """
        value = statistics.value
        if value is None:
            return statistics

        def from_batch(_: Statistics) -> Statistics:
            new = self._after_batch(params, statistics, value, data)
            return dataclasses.replace(new, count=value.count)  # `after_sgd` counts the batch

        return dataclasses.replace(statistics, value=apply_if(value.count == 0, from_batch, value))

    def after_sgd(self, params: Params, statistics: Statistics, data: Collected) -> tuple[Params, Statistics]:
        """Updates the statistics of value targets with the batch `[rows, T]`, and rescales the value network."""
        value = statistics.value
        if value is None:
            return params, statistics
        new = self._after_batch(params, statistics, value, data)
        params = self.networks.rescale_value(params, value, new)
        return params, dataclasses.replace(statistics, value=new)

    def _after_batch(self, params: Params, statistics: Statistics, value: Statistics, data: Collected) -> Statistics:
        loss, preprocessed = self.objective.loss, preprocess_batch(self.networks, statistics, data)
        targets = self.objective.targets(params, statistics, preprocessed).value
        targets = limiters.clip(targets, loss.limits.value_target)
        settings = normalizer.of_scalars(loss.config)
        return normalizer.update(value, targets, data.valid, settings, least_rate=_RATE).statistics
