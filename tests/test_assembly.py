"""The program that is compiled for an estimate is the one that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import PointMass, mesh, tiny_config

from rlstable import sharding
from rlstable.assembly import Assembly
from rlstable.ppo.state import SPECS
from rlstable.runner import Runner
from rlstable.supervise.memory import bytes_of, footprint

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
    shapes = Assembly(config, mesh()).shapes()
    assert jax.tree.structure(shapes) == jax.tree.structure(runner.state)
    for here, there in zip(jax.tree.leaves(shapes), jax.tree.leaves(runner.state), strict=True):
        assert (here.shape, here.dtype, here.sharding) == (there.shape, there.dtype, there.sharding)
    assert bytes_of(shapes) == sum(x.nbytes for x in jax.tree.leaves(runner.state))


def test_the_program_is_the_runners(tmp_path: Path) -> None:
    config = tiny_config(sinks={"console": "off"}, devices=1)
    runner = Runner(config, tmp_path)
    assembly = Assembly(config, mesh())

    def text(ppo: Any, state: Any) -> str:
        specs = (SPECS, sharding.REPLICATED)
        return sharding.over_devices(ppo.iteration, mesh(1), (SPECS,), specs, donate=(0,)).lower(state).as_text()

    assert text(assembly.ppo, assembly.shapes()) == text(runner.ppo, runner.state)


def test_its_footprint() -> None:
    assembly = Assembly(tiny_config(), mesh())
    shapes = assembly.shapes()
    needs = footprint(assembly.compiled(shapes).executable)
    assert needs is not None
    assert needs.arguments == needs.aliased == bytes_of(shapes)
    assert needs.temporary > 0


def test_typed_keys_and_several_devices() -> None:
    shapes = Assembly(tiny_config(env={"name": "test_assembly:Keyed"}), mesh(2)).shapes()
    assert jnp.issubdtype(shapes.env_state.info["typed"].dtype, jax.dtypes.prng_key)
    assert shapes.env_state.obs.sharding.spec == sharding.SPLIT
    assert shapes.params["policy"] is not None
