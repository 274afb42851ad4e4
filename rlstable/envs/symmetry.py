"""The mirror of an environment, for `ppo.symmetry`; only robots have one."""

from __future__ import annotations

from rlstable.config import Config
from rlstable.device.reflection import Mirror
from rlstable.device.trees import Env


def mirror_of(config: Config, env: Env) -> tuple[Mirror | None, str | None]:
    """The mirror of a robot's observations and actions, and with `if_symmetric` the reason if there is none.

    Raises `ConfigError` with `auto` if the robot or its task is not symmetric.
    """
    asked = config.ppo.symmetry
    if asked is None or config.network.recurrent is not None:
        return None, asked and "the memory of a GRU has no mirror image"
    from rlstable.robot import symmetry
    from rlstable.robot.environment import RobotEnv

    robot = getattr(env, "unwrapped", env)
    assert isinstance(robot, RobotEnv)  # the configuration has checked it
    mirror, why = (symmetry.mirror_of(robot), None) if asked == "auto" else symmetry.useful_mirror_of(robot)
    if mirror is None:
        return None, why
    stacked = {key: reflection.repeated(config.env.history) for key, reflection in mirror.observations.items()}
    return mirror._replace(observations=stacked), None
