"""Random keys on the host: the same numbers as JAX's functions."""

import jax
import numpy as np
import pytest

from rlstable.compilation import host_keys


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1])
def test_keys_of_a_seed_are_those_of_jax(seed: int) -> None:
    np.testing.assert_array_equal(host_keys.keys_of_seed(seed), jax.random.split(jax.random.PRNGKey(seed), 4))


def test_split_is_that_of_jax() -> None:
    key = jax.random.PRNGKey(3)
    first, second = host_keys.split(key)
    np.testing.assert_array_equal([first, second], jax.random.split(key))


@pytest.mark.parametrize("number", [0, 5, 2**31 + 4, 2**32 - 1])
def test_folded_key_is_that_of_jax(number: int) -> None:
    key = jax.random.PRNGKey(3)
    np.testing.assert_array_equal(host_keys.fold_in(key, number), jax.random.fold_in(key, number))


def test_shape_is_that_of_a_key() -> None:
    key = jax.random.PRNGKey(3)
    assert (host_keys.shape().shape, host_keys.shape().dtype) == (key.shape, key.dtype)
