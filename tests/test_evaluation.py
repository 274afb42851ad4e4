"""Evaluation where memory is short: more passes, the same episodes."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.envs.wrappers import Episodes
from rlstable.evaluation import Evaluator, Judged, policy_of
from rlstable.precision import SINGLE
from rlstable.supervise.memory_plan import OutOfMemory


class State:
    """Of a training state, what an evaluation looks at."""

    params = jax.device_put(jnp.ones(3))
    normalizer = jax.device_put(jnp.zeros(3))


def play(params: Any, statistics: Any, keys: jax.Array, key: jax.Array) -> Episodes:
    """Episodes that are as good as their random keys say."""
    reward = jax.vmap(jax.random.uniform)(keys)
    return Episodes({"reward": reward * params[0]}, jnp.ones_like(reward), jnp.zeros_like(reward))


class Refusing(Evaluator):
    """One whose device has room for a few episodes at a time."""

    def __init__(self, count: int, room: int, error: str = "RESOURCE_EXHAUSTED: Out of memory"):
        self.told: list[tuple[str, dict[str, Any]]] = []
        super().__init__(
            play,
            count,
            SINGLE,
            lambda _: contextlib.nullcontext(),
            lambda kind, **fields: self.told.append((kind, fields)),
        )
        self._room, self._error = room, error

    def _episodes(self, judged: tuple[Judged, ...]) -> list[Episodes]:
        if self._numbers().shape[1] > self._room:
            raise jax.errors.JaxRuntimeError(self._error)
        return super()._episodes(judged)


POLICY = [policy_of(State, jax.random.PRNGKey(5))]  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "room", "passes"), [(8, 8, 1), (8, 4, 2), (8, 1, 8), (7, 2, 4), (3, 1, 3)])
def test_the_episodes_are_the_same_in_more_passes(count: int, room: int, passes: int) -> None:
    short = Refusing(count, room)
    [row], [whole] = short.judge(POLICY), Refusing(count, count).judge(POLICY)
    for name in ("eval/episode_reward", "eval/episode_reward_std", "eval/avg_episode_length", "eval/aborted_share"):
        assert row[name] == whole[name], name
    doublings = [kind for kind, _ in short.told]
    assert doublings == ["evaluation_divided"] * len(doublings)
    assert (short.told[-1][1] if short.told else {"passes": 1}) == {"passes": passes}
    assert np.isfinite(row["eval/sps"])  # type: ignore[arg-type]


def test_no_room_for_a_single_episode_ends_by_name() -> None:
    with pytest.raises(OutOfMemory, match=r"a single evaluation episode; .*eval\.num_evals=0"):
        Refusing(4, 0).judge(POLICY)


def test_another_error_is_not_taken_for_that() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        Refusing(4, 0, "INTERNAL: something else").judge(POLICY)


def test_a_refusal_while_it_compiles_is_met_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Refusing(4, 4)
    compiled, refused = own._play, [True]

    class Lowering:
        def lower(self, *args: Any) -> Any:
            if refused and refused.pop():
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while compiling")
            return compiled.lower(*args)

    monkeypatch.setattr(own, "_play", Lowering())
    own.prepare(POLICY)
    assert own.told == [("evaluation_divided", {"passes": 2})]
