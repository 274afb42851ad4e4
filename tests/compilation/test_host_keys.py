"""Random keys on the host: the same numbers as JAX's functions."""

import jax
import numpy as np
import pytest

from rlstable.compilation import host_keys


@pytest.mark.parametrize("number", [0, 7, 2**31, 2**32 - 1])
def test_keys_on_the_host_are_those_of_jax(number: int) -> None:
    key = jax.random.PRNGKey(3)
    np.testing.assert_array_equal(host_keys.keys_of_seed(number), jax.random.split(jax.random.PRNGKey(number), 4))
    np.testing.assert_array_equal(host_keys.fold_in(key, number), jax.random.fold_in(key, number))
    np.testing.assert_array_equal(host_keys.split(key), jax.random.split(key))
    assert (host_keys.shape().shape, host_keys.shape().dtype) == (key.shape, key.dtype)
