"""The program that is compiled for an estimate is the one that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import PointMass, mesh, tiny_config

from rlstable import sharding
from rlstable.ppo.state import SPECS
from rlstable.runner import Runner
from rlstable.supervise.memory import footprint
from rlstable.supervise.program import assemble, bytes_of, compile_training, state_shapes

pytestmark = pytest.mark.usefixtures("quick_compile")


class Keyed(PointMass):
    """One that carries a typed random key from step to step."""

    def reset(self, rng: jax.Array) -> Any:
        state = super().reset(rng)
        return state.replace(info={**state.info, "typed": jax.random.key(3)})


@pytest.mark.parametrize(
    "sections", [{}, {"env": {"reset": "pool"}}, {"guards": {}}, {"ppo": {"normalize_rewards": True}}], ids=str
)
def test_the_shapes_are_those_of_the_runners_first_state(sections: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(**{"sinks": {"console": "off"}, "devices": 1, **sections})
    runner = Runner(config, tmp_path)
    shapes = state_shapes(assemble(config, runner._env), mesh(1))
    assert jax.tree.structure(shapes) == jax.tree.structure(runner.state)
    for here, there in zip(jax.tree.leaves(shapes), jax.tree.leaves(runner.state), strict=True):
        assert (here.shape, here.dtype, here.sharding) == (there.shape, there.dtype, there.sharding)
    assert bytes_of(shapes) == sum(x.nbytes for x in jax.tree.leaves(runner.state))


def test_the_program_is_the_runners(tmp_path: Path) -> None:
    config = tiny_config(sinks={"console": "off"}, devices=1)
    runner = Runner(config, tmp_path)
    ppo = assemble(config, runner._env)

    def text(ppo: Any, state: Any) -> str:
        specs = (SPECS, sharding.REPLICATED)
        return sharding.over_devices(ppo.iteration, mesh(1), (SPECS,), specs, donate=(0,)).lower(state).as_text()

    assert text(ppo, state_shapes(ppo, mesh(1))) == text(runner.ppo, runner.state)


def test_its_footprint() -> None:
    config = tiny_config()
    ppo = assemble(config, PointMass())
    needs = footprint(compile_training(ppo, mesh(1)))
    assert needs.arguments == needs.aliased == bytes_of(state_shapes(ppo, mesh(1)))
    assert needs.temporary > 0


def test_typed_keys_and_several_devices() -> None:
    shapes = state_shapes(assemble(tiny_config(), Keyed()), mesh(2))
    assert jnp.issubdtype(shapes.env_state.info["typed"].dtype, jax.dtypes.prng_key)
    assert shapes.env_state.obs.sharding.spec == sharding.SPLIT
    assert shapes.params["policy"] is not None
