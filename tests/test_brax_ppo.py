"""`rlstable.brax_ppo.train` has the arguments, the calls and the results of Brax's `ppo.train`."""

import dataclasses
import functools
import inspect
import math
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax import envs
from brax.training.acme import running_statistics
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as brax_train
from commands import printed_by
from toys import PointMass, assemble, tiny_config

from rlstable import ConfigError, brax_ppo
from rlstable.brax_ppo.arguments import overrides_of
from rlstable.brax_ppo.params import from_brax, to_brax
from rlstable.cli.compose import compose
from rlstable.config.overrides import literal
from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.envs.objects import Environments
from rlstable.policy.playback import load_policy_environment
from rlstable.policy.saved_run import open_run
from rlstable.ppo.state import SPECS
from rlstable.runner.loop import TrainingLoop
from scripts.rivals import brax_trainer

pytestmark = pytest.mark.usefixtures("quick_compile")

DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(brax_train.train).parameters.items()
    if parameter.default is not inspect.Parameter.empty
}
SMALL = functools.partial(ppo_networks.make_ppo_networks, policy_hidden_layer_sizes=(8,), value_hidden_layer_sizes=(8,))
# Two epochs of two iterations, 8 * 4 * 2 = 64 steps each.
TINY = {
    "num_timesteps": 200, "num_evals": 3, "episode_length": 20, "num_envs": 8, "unroll_length": 4, "batch_size": 8,
    "num_minibatches": 2, "num_updates_per_batch": 2, "num_eval_envs": 4, "network_factory": SMALL,
    "normalize_observations": True, "learning_rate": 1e-3, "max_devices_per_host": 1,
}  # fmt: skip


def arguments(**given: Any) -> dict[str, Any]:
    return {**DEFAULTS, "environment": None, "episode_length": 100, "num_timesteps": 1000, **given}


def config_of(**given: Any) -> dict[str, Any]:
    return overrides_of(arguments(**given))


def test_signature_is_that_of_brax_with_three_keyword_arguments_more() -> None:
    ours, theirs = inspect.signature(brax_ppo.train).parameters, inspect.signature(brax_train.train).parameters
    assert len(theirs) == 52 and list(ours) == [*theirs, "run_dir", "guards", "overrides"]
    with pytest.raises(TypeError, match="missing a required argument: 'num_timesteps'"):
        brax_ppo.train(None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vision": True}, r"^vision: rlstable does not train on pixels"),
        ({"augment_pixels": True}, r"^vision: rlstable does not train on pixels"),
        ({"episode_length": None}, r"^episode_length: must be given"),
        ({"wrap_env": False}, r"^wrap_env: rlstable vectorises the environment itself"),
        ({"wrap_env_fn": lambda env: env}, r"^wrap_env_fn: '<lambda>' is not known"),
        ({"wrap_env_fn": functools.partial(envs.training.wrap, extra=1)}, r"^wrap_env_fn: .* extra are not known"),
        ({"network_factory": lambda *args: None}, r"^network_factory: '<lambda>' is not supported"),
        ({"network_factory": functools.partial(SMALL, 3)}, r"^network_factory: give the arguments .* by name"),
        ({"network_factory": functools.partial(SMALL, depth=3)}, r"^network_factory: .* has no argument depth"),
        ({"use_distributional_critic": True}, r"^use_distributional_critic: must be the same"),
        ({"overrides": ["seeds=2", "devices=1"]}, r"^seeds: ppo\.train trains one seed"),
        ({"eval_env": PointMass()}, r"^eval_env: has observations \(4,\) and 2 actions, environment has \(2,\) and 1"),
        ({"overrides": ["env.backend=mjx"]}, r"^env\.backend: must be null: an environment object cannot be changed"),
        ({"overrides": ["env.kwargs={a: 1}"]}, r"^env\.kwargs: must be null: an environment object cannot be changed"),
        ({"overrides": ["env.history=2"]}, r"^env\.history: must be 1, because network_factory"),
        ({"overrides": ["eval.randomize=true"]}, r"^eval\.env_kwargs: must be null and eval\.randomize false"),
    ],
)  # fmt: skip
def test_argument_or_setting_that_rlstable_does_not_take_is_one_line_and_leaves_no_run(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        brax_ppo.train(envs.get_environment("fast"), **{**TINY, **given}, run_dir=tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_batch_that_does_not_fit_the_environments_is_a_value_error_as_in_brax(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ppo\.num_envs: 7 does not divide"):
        brax_ppo.train(envs.get_environment("fast"), **{**TINY, "num_envs": 7}, run_dir=tmp_path)


@pytest.mark.parametrize(
    ("given", "steps", "evaluations", "at_start"),
    [
        (
            {"num_timesteps": 2**15, "num_evals": 3, "unroll_length": 5, "batch_size": 64, "num_minibatches": 8},
            35_840, 2, True,
        ),
        ({"num_timesteps": 1, "num_evals": 1}, 32 * 10 * 16, 1, False),
        ({"num_timesteps": 1, "num_evals": 0}, 32 * 10 * 16, 0, False),
        (
            {"num_timesteps": 1, "num_evals": 4, "num_resets_per_eval": 2, "action_repeat": 2},
            6 * 2 * 32 * 10 * 16, 3, True,
        ),
        ({"num_timesteps": 1, "num_evals": 4, "run_evals": False}, 3 * 32 * 10 * 16, 0, False),
    ],
)  # fmt: skip
def test_steps_and_evaluations_are_those_of_brax(
    given: dict[str, Any], steps: int, evaluations: int, at_start: bool
) -> None:
    config = config_of(**given)
    assert config["total_steps"] == steps
    assert (config["eval.num_evals"], config["eval.at_start"]) == (evaluations, at_start)


def test_resets_without_evaluations_are_as_many_as_with_them() -> None:
    assert config_of(num_evals=4, num_resets_per_eval=2)["ppo.num_resets_per_eval"] == 2
    assert config_of(num_evals=4, num_resets_per_eval=2, run_evals=False)["ppo.num_resets_per_eval"] == 6


def test_network_factory_of_functions_and_jax_scalars_becomes_names_and_numbers() -> None:
    factory = functools.partial(
        SMALL,
        activation=jax.nn.elu,
        distribution_type="normal",
        noise_std_type="log",
        mean_kernel_init_fn=jax.nn.initializers.orthogonal,
        mean_kernel_init_kwargs={"scale": jnp.float32(0.5)},
        policy_obs_key="state",
        value_obs_key="privileged_state",
    )
    config = config_of(network_factory=functools.partial(factory, init_noise_std=0.8))
    assert config["network.activation"] == "elu"
    assert config["network.mean_kernel_init"] == "orthogonal"
    assert config["network.mean_kernel_init_kwargs"] == {"scale": 0.5}
    assert config["network.policy_hidden_layer_sizes"] == (8,)
    assert config["network.value_obs_key"] == "privileged_state"
    assert config["network.init_noise_std"] == 0.8
    assert config_of()["network.activation"] in ("silu", "swish")
    assert config_of()["network.value_hidden_layer_sizes"] == (256,) * 5


def test_settings_that_brax_ignores_are_ignored_with_one_warning() -> None:
    factory = functools.partial(SMALL, noise_std_type="log", init_noise_std=0.8, mean_clip_scale=5.0)
    with pytest.warns(UserWarning, match="noise_std_type, init_noise_std, mean_clip_scale") as caught:
        config = config_of(network_factory=factory)
    assert len(caught) == 1
    assert not {"network.noise_std_type", "network.mean_clip_scale"} & config.keys()


def test_adaptive_rate_is_recognised_by_name_and_by_enum() -> None:
    for schedule in ("ADAPTIVE_KL", brax_train.ppo_optimizer.LRSchedule.ADAPTIVE_KL):
        assert config_of(learning_rate_schedule=schedule, desired_kl=0.02)["ppo.desired_kl"] == 0.02
    assert "ppo.desired_kl" not in config_of()


def test_full_reset_of_playground_draws_new_first_states() -> None:
    def wrap_for_brax_training(*_: Any, **__: Any) -> None:
        """Stands for the function of Playground, which may not be installed."""

    wrap_for_brax_training.__module__ = "mujoco_playground._src.wrapper"
    assert "env.reset" not in config_of(wrap_env_fn=wrap_for_brax_training)
    assert config_of(wrap_env_fn=functools.partial(wrap_for_brax_training, full_reset=True))["env.reset"] == "pool"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny training with every callback."""
    folder = tmp_path_factory.mktemp("brax")
    calls: dict[str, Any] = {"progress": [], "parameters": [], "folder": folder}
    make_policy, params, metrics = brax_ppo.train(
        envs.get_environment("fast"),
        **TINY,
        progress_fn=lambda step, metrics: calls["progress"].append((step, metrics)),
        policy_params_fn=lambda step, make_policy, params: calls["parameters"].append((step, params)),
        save_checkpoint_path=str(folder / "brax"),
        run_dir=folder / "run",
        overrides=["logging=quiet"],
    )
    return calls | {"make_policy": make_policy, "params": params, "metrics": metrics}


def test_progress_is_called_at_the_steps_of_brax_with_floats(trained: dict[str, Any]) -> None:
    assert [step for step, _ in trained["progress"]] == [0, 128, 256]
    assert [step for step, _ in trained["parameters"]] == [0, 128, 256]
    first, *rest = [metrics for _, metrics in trained["progress"]]
    assert not any(name.startswith("training/") for name in first)
    for metrics in (first, *rest):
        assert all(type(value) is float for value in metrics.values())
        assert {"eval/episode_reward", "eval/episode_reward_std", "eval/avg_episode_length"} <= metrics.keys()
        assert {"eval/walltime", "eval/sps", "eval/epoch_eval_time"} <= metrics.keys()
    brax_names = {"total_loss", "policy_loss", "v_loss", "entropy_loss", "kl_mean", "learning_rate", "sps", "walltime"}
    assert {f"training/{name}" for name in brax_names} <= rest[-1].keys()
    assert trained["metrics"] == rest[-1]


def test_returned_parameters_are_those_of_the_last_call_and_can_be_pickled(trained: dict[str, Any]) -> None:
    params = trained["params"]
    jax.tree.map(np.testing.assert_array_equal, list(params), list(trained["parameters"][-1][1]))
    assert isinstance(params[0], running_statistics.RunningStatisticsState)
    assert params[1]["params"]["hidden_0"]["kernel"].shape == (2, 8)
    again = pickle.loads(pickle.dumps(params))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    count = params[0].count
    assert int(count.hi) == 0 and 0 < int(count.lo) <= 256  # the trust region may hold samples back


def test_actions_are_those_of_brax_inference_function_bit_for_bit(trained: dict[str, Any]) -> None:
    network = SMALL((2,), 1, running_statistics.normalize)
    observation, key = jnp.array([[0.3, -0.2], [1.0, 2.0]]), jax.random.PRNGKey(3)
    for deterministic in (False, True):
        theirs = ppo_networks.make_inference_fn(network)(trained["params"], deterministic)(observation, key)[0]
        ours = trained["make_policy"](trained["params"], deterministic)(observation, key)[0]
        np.testing.assert_array_equal(ours, theirs)


def test_no_steps_return_restored_parameters_and_no_metrics(trained: dict[str, Any]) -> None:
    path = str(trained["folder"] / "brax" / "000000000256")
    env, settings = envs.get_environment("fast"), {**TINY, "num_timesteps": 0}
    _, fresh, metrics = brax_ppo.train(env, **settings)
    assert metrics == {}
    _, restored, _ = brax_ppo.train(env, **settings, restore_checkpoint_path=path)
    jax.tree.map(np.testing.assert_array_equal, list(restored[1:]), list(trained["params"][1:]))
    _, policy_only, _ = brax_ppo.train(env, **settings, restore_params=trained["params"], restore_value_fn=False)
    jax.tree.map(np.testing.assert_array_equal, policy_only[1], trained["params"][1])
    jax.tree.map(np.testing.assert_array_equal, policy_only[2], fresh[2])


def test_run_starts_from_restored_parameters(trained: dict[str, Any], tmp_path: Path) -> None:
    seen: list[Any] = []
    brax_ppo.train(
        envs.get_environment("fast"), **TINY, restore_params=trained["params"], run_dir=tmp_path / "run",
        policy_params_fn=lambda step, _, params: seen.append((step, params)), overrides=["logging=quiet"],
    )  # fmt: skip
    step, params = seen[0]
    assert step == 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), list(params), list(trained["params"]))


def test_resume_continues_from_the_checkpoint_whatever_is_restored(trained: dict[str, Any], tmp_path: Path) -> None:
    """A completed run that is resumed trains nothing, and returns what it has."""
    env, folder = envs.get_environment("fast"), trained["folder"] / "run"
    again = brax_ppo.train(
        env, **TINY, run_dir=folder, restore_params=brax_ppo.train(env, **{**TINY, "num_timesteps": 0})[1],
        overrides=["logging=quiet", "resume=auto"],
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, list(again[1]), list(trained["params"]))
    assert again[2]["eval/episode_reward"] == trained["metrics"]["eval/episode_reward"]


def test_without_evaluations_parameters_are_passed_on_and_no_metrics_returned(tmp_path: Path) -> None:
    steps: list[int] = []
    settings = {**TINY, "num_evals": 0, "max_devices_per_host": 1000, "num_timesteps": 64}
    _, _, metrics = brax_ppo.train(
        envs.get_environment("fast"), **settings, run_dir=tmp_path / "run", overrides=["logging=quiet", "devices=1"],
        policy_params_fn=lambda step, *_: steps.append(step), progress_fn=lambda *_: steps.append(-1),
    )  # fmt: skip
    assert (steps, metrics) == ([0, 64], {})


def test_evaluation_that_a_state_guard_prevents_is_a_call_with_nan(tmp_path: Path) -> None:
    """Brax's scripts read the return at every call; the run evaluates no state that a guard rejects."""
    calls: list[tuple[int, dict[str, float]]] = []
    strict = ["guards.policy.max_kl=1e-9", "guards.policy.patience=100", "logging=quiet"]  # trips in every iteration
    brax_ppo.train(
        envs.get_environment("fast"), **TINY, run_dir=tmp_path / "run", overrides=strict,
        progress_fn=lambda *call: calls.append(call),
    )  # fmt: skip
    returns = {step: metrics["eval/episode_reward"] for step, metrics in calls}
    assert list(returns) == [0, 128, 256]
    assert [math.isnan(value) for value in returns.values()] == [False, True, True]
    assert math.isfinite(calls[1][1]["training/policy_loss"])


def test_parameters_of_other_networks_are_one_line(trained: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^restore: .*'hidden_0'.* of the policy has shape \(8,\) .* and \(4,\) here"
    ):
        brax_ppo.train(
            envs.get_environment("fast"), run_dir=tmp_path / "run", restore_params=trained["params"],
            **{**TINY, "network_factory": functools.partial(SMALL, policy_hidden_layer_sizes=(4,))},
        )  # fmt: skip


def test_training_metrics_are_logged_at_their_steps(tmp_path: Path) -> None:
    calls: list[tuple[int, dict[str, float]]] = []
    brax_ppo.train(
        envs.get_environment("fast"), **{**TINY, "num_evals": 1}, run_evals=False, log_training_metrics=True,
        training_metrics_steps=128, progress_fn=lambda *call: calls.append(call), run_dir=tmp_path / "run",
        overrides=["logging=quiet"],
    )  # fmt: skip
    logged = [(step, metrics) for step, metrics in calls if any(name.startswith("episode/") for name in metrics)]
    assert [step for step, _ in logged] == [128, 256]
    assert math.isfinite(logged[0][1]["episode/total_loss"]) and math.isfinite(logged[-1][1]["episode/sum_reward"])
    (last,) = [metrics for _, metrics in calls if "training/total_loss" in metrics]
    assert not any(name.startswith("eval/") for name in last)


def test_round_trip_through_the_form_of_brax_changes_nothing() -> None:
    for mode in ("welford", "ema"):
        config = tiny_config(ppo={"normalize_observations_mode": mode})
        loop_params = _untrained_parameters(config)
        observation = jax.ShapeDtypeStruct((4,), jnp.float32)
        params, statistics = from_brax(
            config.ppo, config.network, to_brax(config.ppo, config.network, *loop_params, observation), *loop_params
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (params, statistics), tuple(loop_params))


def _untrained_parameters(config: Any) -> Any:
    _, state = assemble(config)
    filled = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) + 0.5, state.normalizer.variance)
    return state.params, dataclasses.replace(state.normalizer, variance=filled, count=WideCounter.of(1000))


def test_importing_the_drop_in_imports_neither_playground_nor_warp() -> None:
    code = "import rlstable.brax_ppo, sys; print({'mujoco_playground', 'warp'} & set(sys.modules))"
    assert printed_by(code)[-1] == "set()"


ITERATION = {
    "num_timesteps": 64, "num_evals": 1, "run_evals": False, "episode_length": 6, "num_envs": 8, "unroll_length": 4,
    "batch_size": 8, "num_minibatches": 2, "num_updates_per_batch": 2, "normalize_observations": True, "seed": 3,
    "learning_rate": 1e-3, "max_grad_norm": 1.0, "max_devices_per_host": 1,
}  # fmt: skip


ADAPTIVE = {"learning_rate_schedule": "ADAPTIVE_KL", "desired_kl": 2e-3, "learning_rate": 9e-3}


@pytest.mark.parametrize(
    ("observation", "more"),
    [
        ("vector", {}),
        pytest.param("dict", {}, marks=pytest.mark.slow),
        pytest.param("vector", ADAPTIVE, marks=pytest.mark.slow),
    ],
    ids=["vector", "dict", "adaptive rate"],
)
def test_one_iteration_without_guards_is_that_of_brax_own_trainer(
    observation: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """From the same seed: Brax's initial parameters, first states and random keys."""
    env, factory = envs.get_environment("fast"), SMALL
    if observation == "dict":
        env = envs.get_environment("fast", asymmetric_obs=True, obs_mode="dict_state")
        factory = functools.partial(SMALL, value_obs_key="privileged_state")
    settings = {**ITERATION, **more, "network_factory": factory}
    with brax_trainer.with_device_put_replicated():
        _, theirs, _ = brax_train.train(env, **settings)
    ours = one_iteration(env, settings, tmp_path)
    for name, a, b in (("policy", ours[1], theirs[1]), ("value", ours[2], theirs[2])):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4, err_msg=name), a, b)
    for name in ("mean", "std"):
        mine, other = getattr(ours[0], name), getattr(theirs[0], name)
        if observation == "dict":
            mine, other = ({key: part[key] for key in ("state", "privileged_state")} for part in (mine, other))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), mine, other)


def one_iteration(env: Any, settings: dict[str, Any], folder: Path) -> Any:
    """An iteration of rlstable without guards, from the keys that Brax derives from the seed."""
    _, local_key = jax.random.split(jax.random.PRNGKey(settings["seed"]))
    local_key = jax.random.fold_in(local_key, 0)
    local_key, key_env, _ = jax.random.split(local_key, 3)
    epoch_key, _ = jax.random.split(local_key)
    words = [f"{key}={literal(value)}" for key, value in overrides_of(arguments(environment=env, **settings)).items()]
    own = ("env=import", "ppo=default", "env.source=object", "env.name=brax:Env", "env.backend=null")
    config = compose([*own, "guards=off", "supervise=off", "devices=1", *words])
    loop = TrainingLoop(config, folder / "run", environments=Environments(env, env))
    run = loop.single
    initial = brax_ppo.train(env, **{**settings, "num_timesteps": 0})[1]
    run.start_from(*from_brax(config.ppo, config.network, initial, *run.parameters))
    env_state = run.setup.env.reset(jax.random.split(key_env, settings["num_envs"]))
    state = dataclasses.replace(run.state, env_state=env_state, key=jax.random.split(epoch_key, 1)[0])
    state = sharding.place(state, run.programs.mesh, SPECS)
    state, _ = run.setup.compiled(state)(state)
    adapts = config.ppo.learning_rate_schedule == "adaptive_kl"
    assert (float(state.tuning.learning_rate) != np.float32(config.ppo.learning_rate)) == adapts
    loop.close()
    observation = jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs
    return to_brax(config.ppo, config.network, *sharding.first_device((state.params, state.normalizer)), observation)


def test_folder_of_a_run_on_an_environment_object_names_its_class(trained: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"^env\.source: this run was trained on an environment object of brax.envs.fast:Fast"
    ):
        load_policy_environment(open_run(trained["folder"] / "run"), 1, True, None)
