"""Parameters joined into one vector and split again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstable.ppo.flat import ParamFlattener

pytestmark = pytest.mark.usefixtures("quick_compile")
SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=6)


def params_of(shapes):
    rng = np.random.default_rng(len(shapes))
    return {f"layer_{n}": {"kernel": jnp.asarray(rng.normal(size=s), jnp.float32)} for n, s in enumerate(shapes)}


def same(one, other, rtol=0.0):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), one, other)


@settings(max_examples=8)
@given(SHAPES)
def test_joined_parameters_split_to_the_same_tree(shapes):
    params = params_of(shapes)
    layout = ParamFlattener.of(params)
    vector = layout.join(params)
    assert vector.shape == (sum(int(np.prod(shape)) for shape in shapes),)
    same(layout.split(vector), params)


@pytest.mark.parametrize("optimizer", [optax.scale_by_amsgrad(), optax.chain(optax.clip(1.0), optax.adamw(1e-3))])
def test_optimizer_takes_the_same_step_on_the_vector(optimizer):
    params = params_of([(3, 2), (2,), (2, 1)])
    gradient = jax.tree.map(lambda x: jnp.sin(7 * x), params)
    layout = ParamFlattener.of(params)
    state = optimizer.init(params)
    step, after = optimizer.update(gradient, state, params)
    flat_step, flat_after = optimizer.update(layout.join(gradient), layout.join_subtrees(state), layout.join(params))
    same(layout.split(flat_step), step, 1e-6)
    same(layout.split_subtrees(flat_after, state), after, 1e-6)


def test_large_networks_are_not_joined_on_a_cpu(monkeypatch):
    """On a CPU one kernel per layer is faster than one for all."""
    large, small = params_of([(200, 100)]), params_of([(64, 64), (64, 64)])
    state = optax.scale_by_adam().init(large)
    layout = ParamFlattener.of(large)
    same(layout.join(large), large)
    same(layout.split(large), large)
    same(layout.split_subtrees(layout.join_subtrees(state), state), state)
    assert ParamFlattener.of(small).join(small).shape == (2 * 64**2,)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert ParamFlattener.of(large).join(large).shape == (20_000,)
