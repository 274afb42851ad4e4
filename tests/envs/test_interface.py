"""Checks of an imported environment before anything is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ball import Stick
from faulty import Faulty
from mistaken import PARTS, Mistaken
from toys import NamedPointMass, PointMass, Target, tiny_config

from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.envs.interface import check
from rlstable.envs.load import load_env
from rlstable.policy.evaluator import evaluation_env

SCALAR = "it must be a float scalar, for example jnp.zeros(())"
SAME = "return the same in both"
DIFFERS = (
    "{} differs between two traces: a Python counter, np.random or the time never changes in the compiled program; "
    "keep counters in info, and use jax.random with a key in info"
)

# The error message of each mistake.
MISTAKES = {
    "reward_vector": f"reset returns reward as float32[1]; {SCALAR}",
    "reward_vector_step": f"step changes the shape or type of reward: float32[] in reset, float32[1] in step; {SAME}",
    "info_added": (
        'step adds info["speed"], which reset does not have; put it into reset\'s info with the same shape and type'
    ),
    "info_new": (
        "step drops steps, truncation, episode_done from info, where training counts; return info={**state.info, ...}"
    ),
    "info_shape": f'step changes the shape or type of info["age"]: int32[] in reset, int32[1] in step; {SAME}',
    "info_reserved": 'reset returns info["first_state"], which training uses; choose another name',
    "info_text": 'reset returns info["name"] as str; only arrays and numbers can be in a state',
    "metric_dropped": 'step drops metrics["distance"], which reset has; return it from every step',
    "metric_vector": 'reset returns metrics["distance"] as float32[3]; every metric must be a scalar',
    "observation_matrix": "reset returns obs as float32[1,2]; the networks read a vector, or a dictionary of vectors",
    "physics_class": "step changes the structure of pipeline_state; return the same classes as reset",
    "gym": (
        "reset returns tuple; it must return a state with obs, reward, done, metrics, info and "
        "pipeline_state (brax.envs.State) or data (Playground)"
    ),
    "gym_step": "step returns tuple; it must return state.replace(...), a State",
    "python_counter": DIFFERS.format("step"),
    "python_counter_in_reset": DIFFERS.format("reset"),
    "numpy_noise": DIFFERS.format("step"),
    "numpy_goal": DIFFERS.format("reset"),
    "traced_goal": "step reads a value that an earlier call of reset or step traced; keep it in info",
    **{
        f"state {kind}": f'reset returns obs["state"] as {kind}; the networks read a vector, or a dictionary of vectors'
        for kind in PARTS
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_of_an_environment_is_one_line_that_names_the_field(mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(Mistaken(mistake), "my:Env", tiny_config().network)
    assert str(caught.value) == f"env.name: my:Env: {MISTAKES[mistake]}"


def test_action_size_of_an_environment_is_checked() -> None:
    for size in (0, 1.0, "2", None):
        with pytest.raises(ConfigError, match=r"my:Env: it needs action_size, .* a whole number above 0"):
            check(Mistaken(action_size=size), "my:Env")


LINES = {
    "if": ("step raises TracerBoolConversionError: Attempted boolean conversion of traced array", True),
    "numpy": ("step raises TracerArrayConversionError: The numpy.ndarray conversion method", True),
    "missing": ("step raises KeyError: 'goal'", False),
    "host": (
        "jax.vmap of reset and step raises NotImplementedError: vmap is only supported for the pure_callback",
        False,
    ),
    "shapes": ("reset raises TypeError: add got incompatible shapes for broadcasting: (2,), (3,).", False),
}


@pytest.mark.parametrize(("mistake", "said", "hint"), [(k, *v) for k, v in LINES.items()], ids=LINES)
def test_exception_of_an_environment_is_one_line_with_its_file_and_line(mistake: str, said: str, hint: bool) -> None:
    code = (Path(__file__).parent / "mistaken.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(code) if text.endswith(f"# raises: {mistake}"))
    with pytest.raises(ConfigError) as caught:
        check(Mistaken(mistake), "my:Env")
    text = str(caught.value)
    assert text.startswith(f"env.name: my:Env: {said}")
    assert f"mistaken.py:{line})" in text and "\n" not in text
    assert text.endswith("; JAX traces it: use jax.numpy, jnp.where and jax.lax") == hint


def test_trainable_environments_pass_the_check() -> None:
    """Types that training converts without loss, Python state that changes no program, parts that no network reads."""
    lossless = ("none", "reward_int_step", "info_weak", "metric_int", "physics_int")
    for env in (
        PointMass(), NamedPointMass(), Target(), Faulty(named=True, data=True), Stick(), *map(Mistaken, lossless),
        Mistaken("cache"), *(Mistaken(f"other {kind}") for kind in PARTS), Mistaken(action_size=np.int32(1)),
    ):  # fmt: skip
        check(env, "my:Env", tiny_config().network)


def test_evaluation_environment_with_other_arguments_is_checked() -> None:
    config = tiny_config(
        env={"name": "mistaken:Mistaken"}, eval={"env_kwargs": {"mistake": "info_added"}, "num_envs": 2}
    )
    with pytest.raises(ConfigError, match=r'mistaken:Mistaken with eval\.env_kwargs: step adds info\["speed"\]'):
        evaluation_env(config)


class BrokenStick(Stick):
    """Reads what no array has."""

    def step(self, state: Any, action: jax.Array) -> Any:
        return super().step(state.replace(obs=state.obs.speed), action)


def test_exception_while_installing_native_physics_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"reset or step raises AttributeError: .*speed.*test_interface\.py:\d+\)"):
        load_env(EnvConfig(source="import", name="test_interface:BrokenStick", backend="native"))
