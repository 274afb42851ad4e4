"""A run that begins small, with fewer environments and shorter episodes, and grows on healthy stretches."""

from __future__ import annotations

import dataclasses

from rlstable.config import Config
from rlstable.supervise.memory_plan import fewer_envs


@dataclasses.dataclass
class Growth:
    """What a warm start remembers, as plain JSON; saved with the run.

    Attributes:
        stage: Times it has grown.
        healthy: Healthy iterations in a row since then.
    """

    stage: int = 0
    healthy: int = 0


@dataclasses.dataclass
class WarmStart:
    """Decides how large training is.

    Attributes:
        config: The whole configuration, which is the size it grows to.
        devices: How many share the environments.
        growth: How far it has come.
    """

    config: Config
    devices: int
    growth: Growth

    @property
    def grown(self) -> bool:
        """Whether training has its full size."""
        own = self.config.supervise.warm_start
        return not own.enabled or min(self._share(own.num_envs), self._share(own.episode_length)) == 1.0

    @property
    def now(self) -> Config:
        """The configuration at the present size."""
        own, config = self.config.supervise.warm_start, self.config
        if self.grown:
            return config
        count = fewer_envs(config, int(config.ppo.num_envs * self._share(own.num_envs)), self.devices)
        repeat = config.env.action_repeat
        length = int(config.env.episode_length * self._share(own.episode_length))
        return config.model_copy(
            update={
                "ppo": config.ppo.model_copy(update={"num_envs": count or config.ppo.num_envs}),
                "env": config.env.model_copy(update={"episode_length": max(length - length % repeat, repeat)}),
            }
        )

    def watch(self, healthy: bool) -> bool:
        """Takes in an iteration; whether training has grown by it."""
        if self.grown:
            return False
        own = self.growth
        own.healthy = own.healthy + 1 if healthy else 0
        if own.healthy < self.config.supervise.warm_start.grow_after:
            return False
        own.stage, own.healthy = own.stage + 1, 0
        return True

    def _share(self, first: float) -> float:
        return min(1.0, first * self.config.supervise.warm_start.factor**self.growth.stage)
