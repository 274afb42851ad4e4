"""`train`: an ordinary run of rlstable, with guards, supervisor, run folder and report, from Brax's arguments."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo import checkpoint
from brax.training.agents.ppo import networks as ppo_networks

from rlstable.brax_ppo.arguments import SIGNATURE, overrides_of, require
from rlstable.brax_ppo.calls import BraxCalls, MakePolicy, Metrics, absolute
from rlstable.brax_ppo.params import BraxParams, from_brax
from rlstable.cli.compose import compose
from rlstable.compilation.xla import check_flags
from rlstable.config.overrides import literal
from rlstable.device.trees import Env, Observation
from rlstable.envs.interface import require_unwrapped
from rlstable.envs.objects import Environments, name_of
from rlstable.envs.randomized import RandomizedEnv
from rlstable.listeners import listeners_of
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason


def train(
    *args: Any, run_dir: str | Path | None = None, guards: str = "default", overrides: Sequence[str] = (), **kwargs: Any
) -> tuple[MakePolicy, BraxParams, Metrics]:
    """Trains a policy, with the arguments, defaults, calls and results of Brax's `ppo.train`.

    These arguments of Brax differ:

    | argument | difference |
    | --- | --- |
    | `num_timesteps` | 0 returns fresh or restored parameters |
    | `wrap_env`, `vision`, `augment_pixels` | only the defaults: rlstable vectorises itself, and trains on no pixels |
    | `wrap_env_fn` | None, Brax's `wrap` or Playground's `wrap_for_brax_training` |
    | `randomization_fn` | each environment keeps its model for the whole run |
    | `network_factory` | `make_ppo_networks` or a `functools.partial` of it |
    | `use_pmap_on_reset` | no effect: one program resets the environments of all devices |
    | `log_training_metrics` | the metrics are means over the iterations since the last call |

    Args:
        *args: As for Brax.
        run_dir: The run folder; `runs/<env>/<time>` when None.
        guards: The option of the group `guards`: `default`, `strict` or `off`.
        overrides: More overrides as the command takes them, e.g. `["supervise.recovery.attempts=5"]`. They win.
        **kwargs: As for Brax.

    Returns:
        `(make_policy, params, metrics)` as Brax returns them: the inference function of Brax's networks, parameters in
        Brax's form, and the metrics of the last evaluation.

    Raises:
        ConfigError: An argument that rlstable does not take, in one line; a ValueError, before anything compiles.
        KeyboardInterrupt: Ctrl-C, after the run folder was completed.
        SystemExit: SIGTERM, likewise.
    """
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    environment, eval_env = arguments["environment"], arguments["eval_env"]
    check_flags()
    settings = overrides_of(arguments)
    observation = _observation(environment)
    pixels = isinstance(observation, dict) and any(name.startswith("pixels/") for name in observation)
    require(not pixels, "environment: rlstable does not train on pixels; choose an environment without pixels/ keys")
    networks = _networks(arguments, observation)
    make_policy = ppo_networks.make_inference_fn(
        networks,
        compute_value=arguments["bootstrap_on_timeout"] or arguments["clipping_epsilon_value"] is not None,
        use_distributional_critic=arguments["use_distributional_critic"],
    )
    restored = arguments["restore_params"]
    if restored is None and arguments["restore_checkpoint_path"] is not None:
        restored = checkpoint.load(absolute(arguments["restore_checkpoint_path"]))
    if arguments["num_timesteps"] == 0:
        return make_policy, _untrained(arguments, networks, observation, restored), {}
    own = ["env=import", "ppo=default", "env.source=object", f"env.name={name_of(environment)}", "env.backend=null"]
    words = [f"{key}={literal(value)}" for key, value in settings.items()]
    config = compose([*own, f"guards={guards}", *words, *overrides])
    require(
        config.seeds == 1, "seeds: ppo.train trains one seed, as in Brax; call it once per seed, or use rlstable.fit"
    )
    require(
        config.env.history == 1,
        "env.history: must be 1, because network_factory makes networks for one observation; stack observations in the "
        "environment, or use rlstable.fit",
    )
    if eval_env is not None:
        shapes, others = (jax.tree.map(lambda x: x.shape, parts) for parts in (observation, _observation(eval_env)))
        require(
            shapes == others and environment.action_size == eval_env.action_size,
            f"eval_env: has observations {others} and {eval_env.action_size} actions, environment has {shapes} and "
            f"{environment.action_size}; they must be the same",
        )
    environments = Environments(environment, eval_env or environment)
    if (randomization_fn := arguments["randomization_fn"]) is not None:
        environments = Environments(*(RandomizedEnv(env, randomization_fn) for env in environments))
    calls = BraxCalls(arguments, make_policy, observation)
    listeners = listeners_of(config.render, config.logging)
    loop = TrainingLoop(config, run_dir, calls, environments=environments, listeners=listeners)
    calls.loop = loop
    run = loop.single
    try:
        if run.host.iteration == 0:  # a resumed run continues from its checkpoint
            if restored is not None:
                run.start_from(
                    *from_brax(
                        config.ppo, config.network, restored, *run.parameters, value=arguments["restore_value_fn"]
                    )
                )
            arguments["policy_params_fn"](0, make_policy, calls.params)
    except BaseException:
        loop.close()
        raise
    result = loop.run()
    calls.finish(result)
    if result.stop_reason is StopReason.interrupted:
        raise KeyboardInterrupt
    if result.stop_reason is StopReason.preempted:
        raise SystemExit(result.stop_reason.exit_code)
    if result.stop_reason.exit_code:
        warnings.warn(f"training ended as {result.stop_reason.name}; see {loop.run_dir}/report.html", stacklevel=2)
    return make_policy, calls.params, calls.metrics


_OWN = [one for one in inspect.signature(train).parameters.values() if one.kind is one.KEYWORD_ONLY]
# Shown by `help` and by editors.
train.__signature__ = SIGNATURE.replace(parameters=[*SIGNATURE.parameters.values(), *_OWN])  # type: ignore[attr-defined]


def _networks(arguments: dict[str, Any], observation: Observation) -> ppo_networks.PPONetworks:
    """Brax's own networks."""
    normalize = running_statistics.normalize if arguments["normalize_observations"] else lambda x, _: x
    shapes, size = jax.tree.map(lambda x: x.shape, observation), arguments["environment"].action_size
    return arguments["network_factory"](shapes, size, preprocess_observations_fn=normalize)


def _observation(environment: Env) -> Observation:
    """The shapes of an observation."""
    require_unwrapped(environment)
    return jax.eval_shape(environment.reset, jax.random.PRNGKey(0)).obs


def _untrained(
    arguments: dict[str, Any], networks: ppo_networks.PPONetworks, observation: Observation, restored: BraxParams | None
) -> BraxParams:
    """The parameters that Brax returns for `num_timesteps=0`, from the same random keys."""
    key_policy, key_value = jax.random.split(jax.random.split(jax.random.PRNGKey(arguments["seed"]))[0])
    value = networks.value_network.init(key_value)
    if restored is not None:
        return restored[0], restored[1], restored[2] if arguments["restore_value_fn"] else value
    shapes = jax.tree.map(lambda x: specs.Array(x.shape[-1:], jnp.dtype("float32")), observation)
    statistics = running_statistics.init_state(
        shapes,
        std_eps=arguments["normalize_observations_std_eps"],
        mode=arguments["normalize_observations_mode"],
    )
    return statistics, networks.policy_network.init(key_policy), value
