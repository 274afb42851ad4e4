"""Evaluation with little memory: more passes, the same episodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass

from rlstable.compilation.compiler import Compiler
from rlstable.config import ConfigError
from rlstable.envs.episodes import Episodes
from rlstable.policy.evaluator import Evaluator, PolicySnapshot, require_same_observation, snapshot_of
from rlstable.ppo import normalizer
from rlstable.supervise import memory
from rlstable.supervise.memory import Footprint, OutOfMemory

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_evaluation_with_other_observations_is_refused() -> None:
    require_same_observation(PointMass(), PointMass(bound=0.5))
    message = r"eval\.env_kwargs: observations of training have the shape \(4,\), and those of evaluations {.*\(5,\)"
    with pytest.raises(ConfigError, match=message):
        require_same_observation(PointMass(), PointMass(named=True))


class State:
    """The fields of a training state that an evaluation reads."""

    params: ClassVar[Any] = {"policy": jax.device_put(jnp.ones(3))}
    normalizer = normalizer.init(jax.ShapeDtypeStruct((3,), jnp.float32))


def play(params: Any, statistics: Any, keys: jax.Array, key: jax.Array) -> Episodes:
    """Episodes whose rewards depend on their random keys alone."""
    reward = jax.vmap(jax.random.uniform)(keys)
    return Episodes({"reward": reward * params["policy"][0]}, jnp.ones_like(reward), jnp.zeros_like(reward))


class Refusing(Evaluator):
    """An evaluator on a device with memory for a few episodes at a time."""

    def __init__(
        self, count: int, room: int, error: str = "RESOURCE_EXHAUSTED: Out of memory", limit: int | None = None
    ):
        self.told: list[tuple[str, dict[str, Any]]] = []
        self._room, self._error, self.waited = room, error, 0
        report = lambda kind, **fields: self.told.append((kind, fields))  # noqa: E731
        super().__init__(play, count, Compiler(), self._compiling_is_told, report, limit)

    @contextlib.contextmanager
    def _compiling_is_told(self, name: str) -> Iterator[None]:
        assert name == "evaluation"
        self.waited += 1
        yield

    def _episodes(self, judged: tuple[PolicySnapshot, ...]) -> list[Episodes]:
        if self._episode_numbers().shape[1] > self._room:
            raise jax.errors.JaxRuntimeError(self._error)
        return super()._episodes(judged)


POLICY = [snapshot_of(State, jax.random.PRNGKey(5))]  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "room", "passes"), [(8, 8, 1), (8, 4, 2), (7, 2, 4), (3, 1, 3)])
def test_evaluation_in_several_passes_plays_the_same_episodes(count: int, room: int, passes: int) -> None:
    short = Refusing(count, room)
    [row], [whole] = short.evaluate(POLICY), Refusing(count, count).evaluate(POLICY)
    for name in ("eval/episode_reward", "eval/episode_reward_std", "eval/avg_episode_length", "eval/aborted_share"):
        assert row[name] == whole[name], name
    doublings = [kind for kind, _ in short.told]
    assert doublings == ["evaluation_divided"] * len(doublings)
    assert (short.told[-1][1] if short.told else {"passes": 1}) == {"passes": passes}
    assert np.isfinite(row["eval/sps"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "passes"), [(1000, 1), (600, 2), (100, 8), (10, 8)])
def test_program_beyond_the_memory_limit_is_divided_before_it_runs(
    limit: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without memory kills the process instead of refusing memory; every episode needs 100 bytes here."""
    own = Refusing(8, 8, limit=limit)
    monkeypatch.setattr(memory, "footprint", lambda program: Footprint(0, 0, 0, 100 * own._episode_numbers().shape[1]))
    own.evaluate(POLICY)
    assert own.told == [("evaluation_divided", {"passes": passes})] * (passes > 1)


def test_evaluation_without_memory_for_one_episode_is_an_error_and_other_errors_are_raised() -> None:
    with pytest.raises(OutOfMemory, match=r"one evaluation episode; .*eval\.num_evals=0"):
        Refusing(4, 0).evaluate(POLICY)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        Refusing(4, 0, "INTERNAL: something else").evaluate(POLICY)


def test_evaluation_compiles_once_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    own, whole = Refusing(4, 4), Refusing(4, 4)
    threads: list[str] = []
    compile_ = jax.stages.Lowered.compile

    def compile_there(self: Any, *args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_(self, *args)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_there)
    own.begin(POLICY)
    own.begin(POLICY)
    assert own._building is not None
    own._building.result()
    [row], [expected] = own.evaluate(POLICY), whole.evaluate(POLICY)
    own.begin(POLICY)
    assert own._building is None
    assert row["eval/episode_reward"] == expected["eval/episode_reward"]
    assert own.waited == 0 and whole.waited == 1
    assert len(threads) == 2 and all(name.startswith("compiling") for name in threads)


def test_memory_error_in_the_compiling_thread_leads_to_more_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Refusing(4, 4)
    compile_, refused = jax.stages.Lowered.compile, [True]

    def refuse_once(self: Any, *args: Any) -> Any:
        if refused and refused.pop():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while compiling")
        return compile_(self, *args)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse_once)
    own.begin(POLICY)
    own.prepare(POLICY)
    assert own.told == [("evaluation_divided", {"passes": 2})]
