"""Drop-in for `brax.training.agents.ppo.train`: change the import to `from rlstable import brax_ppo as ppo`.

`train` has the signature of Brax 0.14.2. It is an ordinary run of rlstable: guards, supervisor, run folder and report.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo import checkpoint
from brax.training.agents.ppo import networks as ppo_networks

from rlstable.cli.brax_arguments import overrides_of
from rlstable.cli.compose import compose
from rlstable.compilation.jax_flags import check_flags
from rlstable.config import ConfigError
from rlstable.config.overrides import literal
from rlstable.envs.objects import Environments, name_of
from rlstable.envs.randomized import RandomizedEnv
from rlstable.envs.wrappers import without_training_wrappers
from rlstable.policy.brax_format import BraxParams, from_brax
from rlstable.runner.brax_calls import BraxCalls, Metrics, absolute
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason


def train(
    environment: Any,
    num_timesteps: int,
    max_devices_per_host: int | None = None,
    wrap_env: bool = True,
    vision: bool = False,
    augment_pixels: bool = False,
    num_envs: int = 1,
    episode_length: int | None = None,
    action_repeat: int = 1,
    wrap_env_fn: Callable[..., Any] | None = None,
    randomization_fn: Callable[..., Any] | None = None,
    learning_rate: float = 1e-4,
    entropy_cost: float = 1e-4,
    discounting: float = 0.9,
    unroll_length: int = 10,
    batch_size: int = 32,
    num_minibatches: int = 16,
    num_updates_per_batch: int = 2,
    num_resets_per_eval: int = 0,
    normalize_observations: bool = False,
    normalize_observations_std_eps: float = 0.0,
    normalize_observations_mode: str = "welford",
    normalize_until_count: int | None = None,
    reward_scaling: float = 1.0,
    clipping_epsilon: float = 0.3,
    clipping_epsilon_value: float | None = None,
    gae_lambda: float = 0.95,
    max_grad_norm: float | None = None,
    normalize_advantage: bool = True,
    vf_loss_coefficient: float = 0.5,
    bootstrap_on_timeout: bool = False,
    use_distributional_critic: bool = False,
    desired_kl: float = 0.01,
    learning_rate_schedule: Any = None,
    learning_rate_schedule_min_lr: float = 1e-5,
    learning_rate_schedule_max_lr: float = 1e-2,
    network_factory: Callable[..., Any] = ppo_networks.make_ppo_networks,
    seed: int = 0,
    use_pmap_on_reset: bool = True,
    num_evals: int = 1,
    eval_env: Any = None,
    num_eval_envs: int = 128,
    deterministic_eval: bool = False,
    log_training_metrics: bool = False,
    training_metrics_steps: int | None = None,
    progress_fn: Callable[[int, Metrics], None] = lambda *args: None,
    policy_params_fn: Callable[..., None] = lambda *args: None,
    save_checkpoint_path: str | None = None,
    restore_checkpoint_path: str | None = None,
    restore_params: Any = None,
    restore_value_fn: bool = True,
    run_evals: bool = True,
    *,
    run_dir: str | Path | None = None,
    guards: str = "default",
    overrides: Sequence[str] = (),
) -> tuple[Callable[..., Any], BraxParams, Metrics]:
    """Trains a policy, with the arguments, calls and results of Brax's `ppo.train`.

    Args:
        environment: One environment with Brax's or Playground's Env interface.
        num_timesteps: Environment steps, rounded up as in Brax; 0 returns fresh or restored parameters.
        max_devices_per_host: Devices to use; all when None.
        wrap_env: Must be true: rlstable vectorises the environment itself.
        vision: Must be false.
        augment_pixels: Must be false.
        num_envs: As in Brax, like every argument that is not described here.
        episode_length: As in Brax.
        action_repeat: As in Brax.
        wrap_env_fn: None, Brax's `wrap` or Playground's `wrap_for_brax_training`.
        randomization_fn: `(model, rng) -> (model_v, in_axes)`; each environment keeps its model for the whole run.
        learning_rate: As in Brax.
        entropy_cost: As in Brax.
        discounting: As in Brax.
        unroll_length: As in Brax.
        batch_size: As in Brax.
        num_minibatches: As in Brax.
        num_updates_per_batch: As in Brax.
        num_resets_per_eval: As in Brax.
        normalize_observations: As in Brax.
        normalize_observations_std_eps: As in Brax.
        normalize_observations_mode: As in Brax.
        normalize_until_count: As in Brax.
        reward_scaling: As in Brax.
        clipping_epsilon: As in Brax.
        clipping_epsilon_value: As in Brax.
        gae_lambda: As in Brax.
        max_grad_norm: As in Brax.
        normalize_advantage: As in Brax.
        vf_loss_coefficient: As in Brax.
        bootstrap_on_timeout: As in Brax.
        use_distributional_critic: As in Brax.
        desired_kl: As in Brax.
        learning_rate_schedule: As in Brax.
        learning_rate_schedule_min_lr: As in Brax.
        learning_rate_schedule_max_lr: As in Brax.
        network_factory: `make_ppo_networks` or a `functools.partial` of it.
        seed: As in Brax.
        use_pmap_on_reset: Has no effect: one program resets the environments of all devices.
        num_evals: As in Brax: with more than one, the first evaluation is before training.
        eval_env: As in Brax.
        num_eval_envs: As in Brax.
        deterministic_eval: As in Brax.
        log_training_metrics: As in Brax; the metrics are means over the iterations since the last call.
        training_metrics_steps: As in Brax.
        progress_fn: Called as `progress_fn(step, metrics)` after every evaluation, with Brax's names and floats.
        policy_params_fn: Called as `policy_params_fn(step, make_policy, params)` at the same steps.
        save_checkpoint_path: Folder for checkpoints in Brax's format, besides those in the run folder.
        restore_checkpoint_path: A checkpoint in Brax's format.
        restore_params: Parameters as this function returns them; they win over `restore_checkpoint_path`.
        restore_value_fn: As in Brax.
        run_evals: As in Brax.
        run_dir: The run folder; `runs/<env>/<time>` when None.
        guards: The option of the group `guards`: `default`, `strict` or `off`.
        overrides: More overrides as the command takes them, e.g. `["supervise.recovery.attempts=5"]`. They win.

    Returns:
        `(make_policy, params, metrics)` as Brax returns them: the inference function of Brax's networks, parameters in
        Brax's form, and the metrics of the last evaluation.

    Raises:
        ConfigError: An argument that rlstable does not take, in one line; a ValueError, before anything compiles.
        KeyboardInterrupt: Ctrl-C, after the run folder was completed.
        SystemExit: SIGTERM, likewise.
    """
    arguments = dict(locals())
    check_flags()
    if max_devices_per_host is not None:
        arguments["max_devices_per_host"] = min(max_devices_per_host, jax.local_device_count()) or None
    pairs = overrides_of(arguments)
    observation = _observation(environment)
    if isinstance(observation, dict) and any(name.startswith("pixels/") for name in observation):
        raise ConfigError("environment: rlstable does not train on pixels; choose an environment without pixels/ keys")
    make_policy = _make_policy(arguments, observation, environment.action_size)
    restored = _restored(arguments)
    if num_timesteps == 0:
        return make_policy, _untrained(arguments, observation, environment.action_size, restored), {}
    words = [f"guards={guards}", *(f"{key}={literal(value)}" for key, value in pairs), *overrides]
    name = name_of(environment)
    own = ["env=import", "ppo=default", "env.source=object", f"env.name={name}", "env.backend=null"]
    config = compose([*own, *words])
    if config.seeds > 1:
        raise ConfigError("seeds: ppo.train trains one seed, as in Brax; call it once per seed, or use rlstable.fit")
    if eval_env is not None:
        _require_same_spaces(environment, eval_env)
    environments = Environments(environment, eval_env or environment)
    if randomization_fn is not None:
        environments = Environments(*(RandomizedEnv(env, randomization_fn) for env in environments))
    calls = BraxCalls(arguments, make_policy, observation)
    loop = TrainingLoop(config, run_dir, calls, environments=environments)
    calls.loop = loop
    run = loop.single
    try:
        if run.host.iteration == 0:  # a resumed run continues from its checkpoint
            if restored is not None:
                run.start_from(*from_brax(config, restored, *run.parameters, value=restore_value_fn))
            policy_params_fn(0, make_policy, calls.params)
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


def _make_policy(arguments: dict[str, Any], observation: Any, action_size: int) -> Callable[..., Any]:
    """Brax's own inference function for its own networks."""
    distributional = arguments["use_distributional_critic"]
    if distributional and arguments["clipping_epsilon_value"] is None:
        raise ConfigError("clipping_epsilon_value: use_distributional_critic needs it, as the bound of its Huber loss")
    return ppo_networks.make_inference_fn(
        _networks(arguments, observation, action_size),
        compute_value=arguments["bootstrap_on_timeout"] or arguments["clipping_epsilon_value"] is not None,
        use_distributional_critic=distributional,
    )


def _networks(arguments: dict[str, Any], observation: Any, action_size: int) -> Any:
    normalize = running_statistics.normalize if arguments["normalize_observations"] else lambda x, _: x
    shapes = jax.tree.map(lambda x: x.shape, observation)
    return arguments["network_factory"](shapes, action_size, preprocess_observations_fn=normalize)


def _restored(arguments: dict[str, Any]) -> Any:
    """Parameters to start from; None for fresh ones."""
    if arguments["restore_params"] is not None:
        return arguments["restore_params"]
    path = arguments["restore_checkpoint_path"]
    return None if path is None else checkpoint.load(absolute(path))


def _observation(environment: Any) -> Any:
    """The shapes of an observation."""
    return jax.eval_shape(without_training_wrappers(environment)[0].reset, jax.random.PRNGKey(0)).obs


def _require_same_spaces(environment: Any, eval_env: Any) -> None:
    """Checks that a policy of one environment can act in the other.

    Raises:
        ConfigError: The observations or the actions differ.
    """
    shapes, others = (jax.tree.map(lambda x: x.shape, _observation(env)) for env in (environment, eval_env))
    if shapes != others or environment.action_size != eval_env.action_size:
        raise ConfigError(
            f"eval_env: has observations {others} and {eval_env.action_size} actions, environment has {shapes} and "
            f"{environment.action_size}; they must be the same"
        )


def _untrained(arguments: dict[str, Any], observation: Any, action_size: int, restored: Any) -> BraxParams:
    """The parameters that Brax returns for `num_timesteps=0`, from the same random keys."""
    networks = _networks(arguments, observation, action_size)
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
