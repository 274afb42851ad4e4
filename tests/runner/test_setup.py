"""`TrainingSetup`: shapes before the run equal those of the run, and programs are built once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved import lines
from toys import PointMass, assert_same, mesh, tiny_config

from rlstable.compilation.compiler import Compiler
from rlstable.config import ConfigError
from rlstable.device import sharding
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import SPECS
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise.memory import bytes_of

pytestmark = pytest.mark.usefixtures("quick_compile")


class Keyed(PointMass):
    """A point mass whose state has a typed random key."""

    def reset(self, rng: jax.Array) -> Any:
        state = super().reset(rng)
        return state.replace(info={**state.info, "typed": jax.random.key(3)})


def test_gradient_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the shapes of its metrics and the loop over minibatches: the gradient is half of the tracing work."""
    traced: list[Any] = []
    gradient = PPO.gradient

    def told(self: PPO, *args: Any) -> Any:
        traced.append(args)
        return gradient(self, *args)

    monkeypatch.setattr(PPO, "gradient", told)
    assembly = TrainingSetup(tiny_config(guards={}), mesh())
    program = sharding.over_devices(
        assembly.ppo.iteration, mesh(1), (SPECS,), (SPECS, sharding.REPLICATED), donate=(0,)
    )
    program.lower(assembly.shapes())
    assert len(traced) == 1


def test_shapes_keep_typed_keys_and_split_environments_over_devices() -> None:
    shapes = TrainingSetup(tiny_config(env={"name": "test_setup:Keyed"}), mesh(2)).shapes()
    assert jnp.issubdtype(shapes.env_state.info["typed"].dtype, jax.dtypes.prng_key)
    assert shapes.env_state.obs.sharding.spec == sharding.SPLIT
    assert shapes.params["policy"] is not None


def test_program_begun_in_the_background_is_the_program_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    built: list[str] = []
    build = Compiler.build

    @contextlib.contextmanager
    def compiling(name: str) -> Iterator[None]:
        told.append(name)
        yield

    def counted(self: Compiler, name: str, *args: Any, **options: Any) -> Any:
        built.append(name)
        return build(self, name, *args, **options)

    monkeypatch.setattr(Compiler, "build", counted)
    setup = TrainingSetup(tiny_config(), mesh(), compiling=compiling)
    state = setup.first_state(jax.random.PRNGKey(0), jax.random.PRNGKey(1), tiny_config().fault, ahead=True)
    assert told == ["resets"] and built.count("training 1") == 1
    program = setup.compiled(state)
    assert told == ["resets", "training"] and built.count("training 1") == 1
    assert np.isfinite(program(state)[1].values["training/total_loss"])


def test_first_state_does_not_depend_on_compiling_ahead() -> None:
    keys = jax.random.PRNGKey(0), jax.random.PRNGKey(1)
    ahead, plain = (
        TrainingSetup(tiny_config(), mesh()).first_state(*keys, tiny_config().fault, a) for a in (True, False)
    )
    assert_same(ahead, plain)


def test_missing_time_out_is_an_error_before_anything_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("a program was compiled"))
    config = tiny_config(ppo={"bootstrap_on_timeout": True})
    assembly = TrainingSetup(config, mesh())
    with pytest.raises(ConfigError, match=r"ppo\.bootstrap_on_timeout: toys:PointMass has no info\['time_out'\]"):
        assembly.begin()


# --- `shared_programs` applies to the rest of this file


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize(
    "sections", [{}, {"env": {"reset": "pool"}}, {"guards": {}}, {"ppo": {"normalize_values": True}}], ids=str
)
def test_shapes_are_those_of_the_first_state_of_a_run(sections: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(**{"logging": {"console": "off"}, "devices": 1, **sections})
    runner = TrainingLoop(config, tmp_path)
    shapes = TrainingSetup(config, mesh()).shapes()
    assert jax.tree.structure(shapes) == jax.tree.structure(runner.single.state)
    for here, there in zip(jax.tree.leaves(shapes), jax.tree.leaves(runner.single.state), strict=True):
        assert (here.shape, here.dtype, here.sharding) == (there.shape, there.dtype, there.sharding)
    assert bytes_of(shapes) == sum(x.nbytes for x in jax.tree.leaves(runner.single.state))


@pytest.mark.usefixtures("shared_programs")
def test_program_is_compiled_ahead_only_for_a_new_run_of_one_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(TrainingSetup, "begin", lambda self: begun.append(self))
    config = tiny_config(logging={"console": "off"}, devices=1, total_steps=64)
    TrainingLoop(config, tmp_path / "alone").run()
    assert len(begun) == 1
    TrainingLoop(config.model_copy(update={"resume": "auto"}), tmp_path / "alone").close()
    TrainingLoop(config.model_copy(update={"seeds": 2}), tmp_path / "fleet").close()
    assert len(begun) == 1


@pytest.mark.parametrize(("stagger", "lengths"), [(False, (12, None)), (True, (12, None)), (True, (100, 12))])
def test_staggered_environments_start_at_different_steps_of_an_episode(
    stagger: bool, lengths: tuple[int, int | None]
) -> None:
    env = {"episode_length": lengths[0], "training_episode_length": lengths[1], "stagger": stagger}
    settings = tiny_config(env={**env, "action_repeat": 2})
    setup = TrainingSetup(settings, mesh(2))
    first = setup.first_state(jax.random.PRNGKey(0), jax.random.PRNGKey(1), settings.fault)
    expected = [0, 0, 2, 4, 6, 6, 8, 10] if stagger else [0] * 8
    for state in (first, setup.reset_envs(first, jax.random.PRNGKey(2))):
        assert np.asarray(state.env_state.info["steps"]).tolist() == expected


@pytest.mark.parametrize(("length", "trained"), [(4, 4), (16, 8)])
def test_training_has_shorter_episodes_than_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int, trained: int
) -> None:
    env = {"name": "toys:Target", "episode_length": 8, "training_episode_length": length}
    run = {"total_steps": 2 * 64, "devices": 1, "eval": {"num_evals": 1, "num_envs": 2}}
    TrainingLoop(tiny_config(env=env, **run), tmp_path).run()
    rows = lines(tmp_path / "metrics.jsonl")
    assert {row["episode/length"] for row in rows if "episode/length" in row} == {trained}
    assert [row["eval/avg_episode_length"] for row in rows if "eval/avg_episode_length" in row] == [8]
    assert ("; episodes of 4 steps in training, 8 in evaluations" in capsys.readouterr().out) is (trained == 4)


def test_first_episodes_of_staggered_environments_count_only_if_they_are_whole(tmp_path: Path) -> None:
    """An iteration is one episode of 8 steps; the environments start at steps 0 to 7."""
    env = {"name": "toys:Target", "episode_length": 8, "stagger": True}
    run = {"total_steps": 3 * 64, "devices": 1, "logging": {"console": "off"}, "eval": {"num_evals": 0}}
    loop = TrainingLoop(tiny_config(env=env, **run), tmp_path)
    loop.run()
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["training/episodes"] for row in rows] == [1, 9, 17]
    assert [row["episode/length"] for row in rows] == [8, 8, 8]
