"""WideCounter compared with the integers of Python."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstable.device.counter import LARGEST, WideCounter, _nearest_float

EDGES = sorted(
    {n for p in (0, 1, 31, 32, 33, 53, 63, 64) for d in (-2, -1, 0, 1, 2) if 0 <= (n := 2**p + d) <= LARGEST}
)
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
WIDE = ("int64", "uint64")

# Uniform draws hardly ever have a short upper word, so most draws pick the number of bits first.
counts = st.one_of(
    st.sampled_from(EDGES),
    st.integers(0, LARGEST),
    st.integers(1, 64).flatmap(lambda bits: st.integers(0, 2**bits - 1)),
)
any_ints = st.one_of(counts, st.integers(-(2**70), 2**70), st.sampled_from((-(2**64), -1, 2**64, 2**64 + 1)))

# Compiled once and shared by all examples.
add = jax.jit(lambda c, x: c + x)
radd = jax.jit(lambda c, x: x + c)
sub = jax.jit(lambda c, x: c - x)
compare = jax.jit(lambda c, x: [compare(c, x) for compare in COMPARISONS])
progress = jax.jit(lambda c, total: c.progress(total))
nearest_float = jax.jit(lambda c: _nearest_float(c.hi, c.lo))
to_float = jax.jit(lambda c: c.to_float())
of = jax.jit(WideCounter.of)


def clip(n: int) -> int:
    """Bring a Python int into the counter's range."""
    return min(max(n, 0), LARGEST)


def assert_canonical(c: WideCounter, shape: tuple[int, ...] = ()) -> None:
    """Two uint32 words of a strong type, as a scan carry needs."""
    for word in (c.hi, c.lo):
        assert (word.dtype, word.shape, word.weak_type) == (jnp.uint32, shape, False)


# --- against Python's integers


@given(counts)
def test_counter_converts_from_and_to_int(n):
    c = WideCounter.of(n)
    assert int(c) == n
    assert repr(c) == f"WideCounter({n})"
    assert bool(c) == (n > 0)
    assert_canonical(c)


@settings(max_examples=200)
@given(counts, counts)
def test_counter_arithmetic_equals_python_and_saturates(a, b):
    x, y = WideCounter.of(a), WideCounter.of(b)
    assert int(add(x, y)) == clip(a + b)
    assert int(sub(x, y)) == clip(a - b)
    assert [bool(r) for r in compare(x, y)] == [op(a, b) for op in COMPARISONS]


@settings(max_examples=40)
@given(counts, any_ints)
def test_counter_takes_python_integers_of_any_size(a, b):
    c = WideCounter.of(a)
    for op in COMPARISONS:
        assert bool(op(c, b)) == op(a, b)
        assert bool(op(b, c)) == op(b, a)
    if b < 0:
        for op in (operator.add, operator.sub):
            with pytest.raises(ValueError, match="negative"):
                op(c, b)
    else:
        assert int(c + b) == int(b + c) == clip(a + b)
        assert int(c - b) == clip(a - b)


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


@pytest.mark.parametrize("total", [7, 10_000, 2**24 + 3, 100_000_000, 2**32 + 2**8 + 1, 2**40 + 2**16 + 12_345])
def test_progress_towards_a_traced_total_has_the_bits_of_a_constant_total(total):
    towards_constant = jax.jit(lambda c: c.progress(total))
    for part in range(300):
        c = WideCounter.of(part * total // 299)
        assert progress(c, WideCounter.of(total)) == towards_constant(c)


@given(counts.filter(lambda n: n <= 2**53))
def test_total_is_rounded_to_the_nearest_float(total):
    assert nearest_float(WideCounter.of(total)) == np.float32(total)


# --- boundaries


def test_counter_saturates_at_64_bits():
    """A saturated count may decrease again."""
    top = WideCounter.of(LARGEST)
    for x in (1, 2**32, LARGEST, 2**64, 2**200, np.uint64(LARGEST), top):
        assert int(top + x) == LARGEST
    assert int(WideCounter.of(2**200)) == LARGEST
    assert int(WideCounter.of(2**63) + 2**63) == LARGEST
    assert int(WideCounter.of(2**64 - 2**32) + (2**32 - 1)) == LARGEST
    assert int(top - 1) == LARGEST - 1
    assert int(WideCounter.of(5) - 2**200) == 0


def test_counter_counts_past_2_to_the_31():
    """Two numbers that made an int32 counter negative in a published training log."""
    assert int(WideCounter.of(jnp.int32(2000683008)) + jnp.int32(666894336)) == 2667577344


def test_progress_is_zero_at_the_start_and_one_at_the_end():
    """At any rounding. A traced total of 0 counts as reached."""
    for total in (1, 3, 2**24 + 1, 2**32 + 2**8 + 1, 2**53 + 1, LARGEST):
        assert float(WideCounter.zero().progress(total)) == 0.0
        assert float(WideCounter.of(total).progress(total)) == 1.0
        assert float(progress(WideCounter.of(clip(total + 1)), WideCounter.of(total))) == 1.0
    zeros = jax.tree.map(jnp.atleast_1d, WideCounter.zero())
    with jax.debug_nans(True):
        assert jax.vmap(WideCounter.progress)(zeros, zeros).tolist() == [1.0]
    assert float(WideCounter.of(LARGEST).progress(10**400)) < 1e-15


# --- transformations


def test_counter_in_a_scan_crosses_2_to_the_32():

    @jax.jit
    def run(c, steps):
        return jax.lax.scan(lambda c, n: (c + n, c < 2**32), c, steps)

    start = 2**32 - 500
    for dtype in (jnp.int32, jnp.uint8):
        end, below = run(WideCounter.of(start), jnp.full(10, 100, dtype))
        assert int(end) == start + 1000
        assert_canonical(end)
        assert below.tolist() == [True] * 5 + [False] * 5
    assert int(jax.lax.fori_loop(0, 7, lambda _, c: c + 2**31, WideCounter.zero())) == 7 * 2**31
    assert int(jax.lax.while_loop(lambda c: c < 2**34, lambda c: c + 2**32, WideCounter.zero())) == 2**34


# --- every dtype


@pytest.mark.parametrize("dtype", ["int2", "uint8", "int32", "uint32"])
def test_counter_takes_narrow_jax_integers(dtype):
    """The whole range of the type, concrete and traced."""
    info = jnp.iinfo(dtype)
    base = 2**32 - 1
    c = WideCounter.of(base)
    for n in {int(info.min), 0, 1, int(info.max)}:
        x = jnp.asarray(n, dtype)
        assert int(add(c, x)) == int(radd(c, x)) == base + max(n, 0)
        assert int(sub(c, x)) == base - max(n, 0)
        assert [bool(r) for r in compare(c, x)] == [op(base, n) for op in COMPARISONS]
        assert_canonical(add(c, x))
        assert int(of(x)) == max(n, 0)
        if n < 0:
            with pytest.raises(ValueError, match="negative"):
                c + x
            with pytest.raises(ValueError, match="negative"):
                WideCounter.of(x)
        else:
            assert int(WideCounter.of(x)) == n
            assert int(c + x) == int(x + c) == base + n
            assert int(c - x) == base - n
            assert [bool(op(x, c)) for op in COMPARISONS] == [op(n, base) for op in COMPARISONS]


@pytest.mark.parametrize("dtype", WIDE)
def test_counter_takes_traced_64_bit_integers(dtype):
    """A 64-bit array is also read after x64 was switched off."""
    base = 2**33 + 5
    with jax.enable_x64(True):
        info = jnp.iinfo(dtype)
        c = WideCounter.of(base)
        for n in {int(info.min), 1, 2**32 - 1, 2**32, 2**40 + 7, int(info.max)}:
            x = jnp.asarray(n, dtype)
            assert int(add(c, x)) == clip(base + max(n, 0))
            assert int(sub(c, x)) == clip(base - max(n, 0))
            assert int(of(x)) == max(n, 0)
            assert [bool(r) for r in compare(c, x)] == [op(base, n) for op in COMPARISONS]
            assert_canonical(add(c, x))
        assert progress(c, c).dtype == to_float(c).dtype == jnp.float32
        assert_canonical(add(c, 1))  # a Python int enters as a weak int64 here
        old = jnp.asarray(2**40 + 7, dtype)
    assert int(WideCounter.of(old)) == 2**40 + 7
    assert int(jax.jit(lambda c: c + old)(c)) == base + 2**40 + 7


# --- as a value in a tree


@pytest.mark.parametrize("number", [2**40 + 12345, LARGEST])
def test_orbax_saves_and_restores_a_counter(tmp_path, number):
    state = {"steps": WideCounter.of(number), "w": jnp.arange(3.0)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))
        words = checkpointer.restore(tmp_path / "state")["steps"]
    assert isinstance(restored["steps"], WideCounter)
    assert int(restored["steps"]) == number
    assert_canonical(restored["steps"] + 1)
    assert int(WideCounter(**words)) == number  # without a target Orbax gives the fields by name


def test_int32_count_of_an_old_checkpoint_becomes_a_counter(tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old", {"steps": jnp.int32(2**31 - 1)})
        assert int(WideCounter.of(checkpointer.restore(tmp_path / "old")["steps"]) + 1) == 2**31
        checkpointer.save(tmp_path / "new", {"steps": WideCounter.of(2**33)})
        restored = checkpointer.restore(tmp_path / "new", item={"steps": WideCounter.zero()})
    assert int(restored["steps"]) == 2**33


# --- bad input

C = WideCounter.of(3)


@pytest.mark.parametrize("bad", [True, jnp.array(True), 1.0, np.float32(1), "1\n2", None], ids=repr)
def test_counter_rejects_types_other_than_integers(bad):
    operations = [WideCounter.of, C.__add__, C.__radd__, C.__sub__, C.__lt__, C.__ge__, C.progress]
    if not (bad is None or isinstance(bad, str | list | complex)):
        operations += [C.__eq__, C.__ne__]
    for operation in operations:
        with pytest.raises(TypeError, match=r"takes an integer: Python, NumPy or JAX.*; got ") as error:
            operation(bad)
        assert "\n" not in str(error.value)


def test_counter_rejects_negative_and_batched_numbers():
    for bad in (-1, -(2**80), -(10**5000), np.int64(-1), jnp.int32(-1)):
        for operation in (WideCounter.of, C.__add__, C.__sub__, C.progress):
            with pytest.raises(ValueError, match="takes no negative count; got "):
                operation(bad)
    for bad in (0, np.int64(0), jnp.int32(0), WideCounter.zero()):
        with pytest.raises(ValueError, match="total above 0; got "):
            C.progress(bad)
    for bad in (np.arange(3), jnp.arange(3)):
        with pytest.raises(ValueError, match="takes a scalar"):
            WideCounter.of(bad)
    with pytest.raises(TypeError, match="got a traced one"):
        jax.jit(int)(C)
    for known in (-1, np.int64(-1), jnp.int32(-1)):  # while tracing
        with pytest.raises(ValueError, match="negative"):
            jax.jit(lambda c, x=known: c + x)(C)


def test_counter_on_the_host_pickles_and_copies():
    """A counter fetched to the host keeps counting and survives pickle and deepcopy."""
    c = WideCounter.of(2**40 - 1)
    for same in (jax.device_get(c), pickle.loads(pickle.dumps(c)), copy.deepcopy(c), WideCounter.of(c)):
        assert int(same) == 2**40 - 1
        assert int(same + 1) == 2**40 and int(same - same) == 0
        assert bool(same == c) and not bool(same < c)
        assert float(same.progress(same)) == 1.0
        assert_canonical(same + same)
