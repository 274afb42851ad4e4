"""Masked reductions equal NumPy over the valid samples, on one device and unevenly over eight."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.device import sharding
from rlstable.device.mesh import make_mesh
from rlstable.guards import masked

ROWS, STEPS = 8, 6  # one row for each of eight devices
DEVICES = pytest.mark.parametrize("devices", [1, 8])
NAN = float("nan")


@functools.cache
def reductions(devices: int) -> Any:
    """All reductions in one program; `x` and `valid` are split by rows."""

    def reduce(x: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
        valid_share = masked.share(valid)
        center, std = masked.mean_and_std(x, valid, valid_share)
        mean = sharding.mean(masked.mean(x, valid, valid_share))
        loss = lambda y: masked.mean(jnp.square(masked.zero_invalid(y, valid)), valid, valid_share)  # noqa: E731
        return {
            "share": valid_share, "mean": mean, "center": center, "std": std,
            "least": masked.minimum(x, valid), "greatest": masked.maximum(x, valid),
            "gradient": jax.grad(loss)(x) / devices,
        }  # fmt: skip

    out = dict.fromkeys(("share", "mean", "center", "std", "least", "greatest"), sharding.REPLICATED)
    return sharding.over_devices(
        reduce, make_mesh(devices), (sharding.SPLIT, sharding.SPLIT), out | {"gradient": sharding.SPLIT}
    )


def sample(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(3.0, 2.0, (ROWS, STEPS)).astype(np.float32)


def uneven() -> np.ndarray:
    """Devices with all, some and no samples valid."""
    valid = np.random.default_rng(1).random((ROWS, STEPS)) < np.linspace(0.1, 1.0, ROWS)[:, None]
    valid[0], valid[-1] = False, True
    return valid


MASKS = {
    "all": np.ones((ROWS, STEPS), bool),
    "uneven": uneven(),
    "half the devices": np.repeat([[True], [False]] * 4, STEPS, axis=1),
    "one": np.arange(ROWS * STEPS).reshape(ROWS, STEPS) == 20,
}


@DEVICES
@pytest.mark.parametrize("mask", MASKS)
def test_masked_reductions_equal_numpy_over_the_valid_samples(devices, mask):
    """NaN at invalid places changes neither a value nor a gradient."""
    valid = MASKS[mask]
    x = np.where(valid, sample(), NAN).astype(np.float32)
    chosen = x[valid].astype(np.float64)
    got = reductions(devices)(x, valid)
    assert got["share"] == pytest.approx(valid.mean(), rel=1e-6)
    assert got["mean"] == pytest.approx(chosen.mean(), rel=1e-5)
    assert got["center"] == pytest.approx(chosen.mean(), rel=1e-5)
    assert got["std"] == pytest.approx(chosen.std(), rel=1e-5, abs=1e-6)
    assert (got["least"], got["greatest"]) == (chosen.min().astype(np.float32), chosen.max().astype(np.float32))
    expected = np.where(valid, 2 * np.nan_to_num(x) / chosen.size, 0.0)
    np.testing.assert_allclose(got["gradient"], expected, rtol=1e-5)


@DEVICES
def test_reductions_without_a_valid_sample_are_zero(devices):
    none = np.zeros((ROWS, STEPS), bool)
    got = reductions(devices)(np.full((ROWS, STEPS), NAN, np.float32), none)
    assert got["share"] > 0
    assert (got["mean"], got["center"], got["std"]) == (0.0, 0.0, 0.0)
    assert (got["least"], got["greatest"]) == (np.inf, -np.inf)
    np.testing.assert_array_equal(got["gradient"], 0.0)


# --- no mask


@pytest.mark.parametrize("devices", [1, 2])
def test_shares_of_parts_are_those_over_all_devices(devices):
    """Every device has its own rows in each part."""
    valid = uneven()
    parts = np.array([[3, 0], [1, 2]], np.int32)
    program = sharding.over_devices(
        lambda valid: masked.shares(valid, parts), make_mesh(devices), (sharding.SPLIT,), sharding.REPLICATED
    )
    own = [rows[parts].mean((1, 2)) for rows in np.split(valid, devices)]
    np.testing.assert_allclose(program(valid), np.mean(own, axis=0), rtol=1e-6)
    assert masked.shares(None, parts) is None
