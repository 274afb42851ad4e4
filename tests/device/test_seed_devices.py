"""Seeds divided over devices: equally many on each, and each seed's numbers on its own device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.device.seed_devices import SeedDevices, device_count_for
from rlstable.device.transforms import vmap_seeds


@pytest.mark.parametrize(
    ("seeds", "available", "requested", "expected"),
    [(8, 8, None, 8), (8, 6, None, 4), (12, 8, None, 6), (7, 4, None, 1), (8, 8, 2, 2), (3, 1, None, 1)],
)
def test_the_device_count_for_that_divide_the_seeds_are_taken(
    seeds: int, available: int, requested: int | None, expected: int
) -> None:
    assert device_count_for(seeds, available, requested) == expected


def test_every_seed_is_computed_on_its_own_device_and_keeps_its_numbers() -> None:
    devices = SeedDevices(2)
    first, second = jax.devices()[:2]
    states = [
        {"x": jnp.full(3, seed, jnp.float32), "key": jax.random.key(seed), "step": jnp.int32(seed)} for seed in range(4)
    ]

    def step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        key, noise = jax.random.split(state["key"])
        return {"x": state["x"] * 2 + jax.random.uniform(noise), "key": key, "step": state["step"] + 1}

    program = devices.program(vmap_seeds(step)).lower(devices.placeholders(states)).compile()
    expected = [step(state) for state in states]
    results = devices.divided(program(devices.joined(states)))
    assert [result["x"].devices() for result in results] == [{first}, {first}, {second}, {second}]
    assert [int(result["step"]) for result in results] == [1, 2, 3, 4]
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours["x"], theirs["x"], rtol=1e-6)
        np.testing.assert_array_equal(jax.random.key_data(ours["key"]), jax.random.key_data(theirs["key"]))
