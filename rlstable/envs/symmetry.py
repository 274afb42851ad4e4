"""The mirror of an environment, for `ppo.symmetry`; only robots have one."""

from __future__ import annotations

from rlstable.config import Config
from rlstable.device.reflection import Mirror
from rlstable.device.trees import Env


def mirror_of(config: Config, env: Env) -> Mirror | None:
    """The mirror of a robot's observations and actions; None without `ppo.symmetry`."""
    if config.ppo.symmetry is None:
        return None
    from rlstable.robot import symmetry
    from rlstable.robot.environment import RobotEnv

    robot = getattr(env, "unwrapped", env)
    assert isinstance(robot, RobotEnv)  # the configuration has checked it
    mirror = symmetry.mirror_of(robot)
    stacked = {key: reflection.repeated(config.env.history) for key, reflection in mirror.observations.items()}
    return mirror._replace(observations=stacked)
