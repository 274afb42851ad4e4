"""WideCounter compared with the integers of Python."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstable.device.counter import LARGEST, WideCounter

EDGES = sorted(
    {n for p in (0, 1, 31, 32, 33, 53, 63, 64) for d in (-2, -1, 0, 1, 2) if 0 <= (n := 2**p + d) <= LARGEST}
)
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)

# Uniform draws hardly ever have a short upper word, so most draws pick the number of bits first.
counts = st.one_of(
    st.sampled_from(EDGES),
    st.integers(0, LARGEST),
    st.integers(1, 64).flatmap(lambda bits: st.integers(0, 2**bits - 1)),
)

# Compiled once and shared by all examples.
add = jax.jit(lambda c, x: c + x)
compare = jax.jit(lambda c, x: [compare(c, x) for compare in COMPARISONS])
progress = jax.jit(lambda c, total: c.progress(total))
of = jax.jit(WideCounter.of)


def assert_canonical(c: WideCounter, shape: tuple[int, ...] = ()) -> None:
    """Two uint32 words of a strong type, as a scan carry needs."""
    for word in (c.hi, c.lo):
        assert (word.dtype, word.shape, word.weak_type) == (jnp.uint32, shape, False)


@settings(max_examples=200)
@given(counts, counts)
def test_counter_arithmetic_equals_python_and_saturates(a, b):
    x, y = WideCounter.of(a), WideCounter.of(b)
    assert (int(x), bool(x)) == (a, a > 0)
    assert int(add(x, y)) == int(x + b) == int(b + x) == min(a + b, LARGEST)
    for results in (compare(x, y), [op(x, b) for op in COMPARISONS]):
        assert [bool(r) for r in results] == [op(a, b) for op in COMPARISONS]
    assert_canonical(add(x, y))


@settings(max_examples=200)
@given(counts, counts.filter(bool))
def test_progress_of_a_counter_is_a_share_of_at_most_one(a, total):
    """Within 1e-6, never above 1, exactly 1 at the end."""
    got = progress(WideCounter.of(a), WideCounter.of(total))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(float(got), min(a / total, 1.0), rtol=1e-6)
    assert float(got) <= 1.0
    if a >= total:
        assert float(got) == 1.0


def test_progress_towards_a_total_of_zero_is_one():
    zeros = jax.tree.map(jnp.atleast_1d, WideCounter.zero())
    with jax.debug_nans(True):
        assert jax.vmap(WideCounter.progress)(zeros, zeros).tolist() == [1.0]


@pytest.mark.parametrize("total", [7, 10_000, 2**24 + 3, 100_000_000, 2**32 + 2**8 + 1, 2**40 + 2**16 + 12_345])
def test_progress_towards_a_traced_total_has_the_bits_of_a_constant_total(total):
    towards_constant = jax.jit(lambda c: c.progress(WideCounter.of(total)))
    for part in range(300):
        c = WideCounter.of(part * total // 299)
        assert progress(c, WideCounter.of(total)) == towards_constant(c)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32"])
def test_counter_takes_narrow_jax_integers(dtype):
    """The whole range of the type, concrete and traced; negative numbers count as 0."""
    info, base = jnp.iinfo(dtype), 2**32 - 1
    c = WideCounter.of(base)
    for n in {int(info.min), 0, 1, int(info.max)}:
        x = jnp.asarray(n, dtype)
        assert int(add(c, x)) == int(c + x) == int(x + c) == base + max(n, 0)
        assert int(of(x)) == int(WideCounter.of(x)) == max(n, 0)
        assert_canonical(add(c, x))


@pytest.mark.parametrize("bad", [True, jnp.array(True), 1.0, np.float32(1), "1", None], ids=repr)
def test_counter_rejects_types_other_than_integers(bad):
    for operation in (WideCounter.of, WideCounter.of(3).__add__, WideCounter.of(3).__lt__):
        with pytest.raises(TypeError, match=r"takes integers"):
            operation(bad)


def test_counter_rejects_negative_constants():
    for bad in (-1, -(2**80), np.int64(-1)):
        with pytest.raises(ValueError, match="takes no negative count; got "):
            WideCounter.of(3) + bad
