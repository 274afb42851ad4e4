"""`rlstable.gym_env`: makes a Gymnasium environment from the name or the configuration of a task."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from rlstable.cli.compose import compose
from rlstable.cli.selection import overrides_for
from rlstable.compilation.xla import check_flags, disable_async_dispatch, enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.config.extras import install

if TYPE_CHECKING:
    from rlstable.config.guards import GuardsConfig
    from rlstable.config.precision import PrecisionConfig
    from rlstable.config.run import EnvConfig
    from rlstable.gym.environments import Task, TaskVector


def gym_env(
    env: Any = None,
    *,
    num_envs: int | None = None,
    render_mode: Literal["rgb_array"] | None = None,
    overrides: Sequence[str] = (),
    **keys: Any,
) -> Task | TaskVector:
    """Makes a `gymnasium.Env`, or with `num_envs` a `gymnasium.vector.VectorEnv`, from any task of rlstable.

    Args:
        env: The environment as for `rlstable.fit`, or a `Config`, such as that of a run folder.
        num_envs: Number of environments that one compiled program steps; None for a single `gymnasium.Env`.
        render_mode: `rgb_array` to draw frames with MuJoCo's renderer; None for no frames.
        overrides: More overrides in the syntax of the command, e.g. `["env.episode_length=500"]`.
        **keys: Top-level keys and groups, as for `rlstable.fit`.

    Raises:
        ConfigError: Gymnasium is not installed, the configuration is wrong, or there is no model to draw.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise ConfigError(f"gym_env: gymnasium is not installed; {install('gymnasium')}")
    if render_mode not in (None, "rgb_array"):
        raise ConfigError(f"render_mode: {render_mode!r} is not available; choose 'rgb_array' or None")
    if num_envs is not None and (isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1):
        raise ConfigError(f"num_envs: {num_envs!r} must be a whole number above 0, or None for a single environment")
    if not isinstance(env, Config):
        words, given = overrides_for(env, keys)
        config = compose([*words, *overrides])
    elif overrides or keys:
        raise ConfigError("gym_env: a Config has all settings; leave out overrides and keys, or give a name")
    else:
        config, given = env, None
    check_flags()
    disable_async_dispatch()  # before JAX is initialised, as native physics needs
    enable_program_cache(config.compile_cache)
    sections = config.env, config.guards, config.precision
    return _made(*sections, given, num_envs, render_mode is not None)


def _made(
    settings: EnvConfig,
    limits: GuardsConfig,
    precision: PrecisionConfig,
    given: Any,
    num_envs: int | None,
    draws: bool,
) -> Task | TaskVector:
    """The environment of a configuration, or of an environment object that the user has `given`."""
    from rlstable.envs.history import with_history
    from rlstable.envs.interface import check, require_unwrapped
    from rlstable.envs.load import load_env
    from rlstable.envs.mujoco_model import model_of
    from rlstable.gym.environments import Task, TaskVector
    from rlstable.gym.frames import Frames
    from rlstable.gym.simulation import Simulation
    from rlstable.render.recording import seconds_per_step

    if given is None:
        single = load_env(settings)
    else:
        require_unwrapped(given)
        single = with_history(given, settings.history)
    if settings.source in ("import", "object"):
        check(single, settings.name)
    model = model_of(getattr(single, "unwrapped", single))
    if draws and model is None:
        raise ConfigError(f"render_mode: {settings.name} has no MuJoCo model to draw; leave render_mode=None")
    fps = None if model is None else 1.0 / (seconds_per_step(single, model) * settings.action_repeat)
    simulation = Simulation(settings, limits, precision, single, autoreset=num_envs is not None)
    frames = Frames(model) if draws and model is not None else None
    if num_envs is None:
        return Task(simulation, single.action_size, fps, frames, model)
    return TaskVector(simulation, single.action_size, fps, frames, num_envs)
