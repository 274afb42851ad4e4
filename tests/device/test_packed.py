"""Many small arrays packed into one, by name or by row, on the host and in compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.device.counter import WideCounter
from rlstable.device.packed import PackedDict, PackedRows

PARTS = {"loss": np.float32(-0.0), "by_cause": np.float32([1, 2, 3]), "kl": np.float32(4), "one": np.float32([5])}


def same(found, expected):
    """Equal numbers of the same types and shapes, structure and all."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (np.asarray(x).dtype, np.shape(x)) == (np.asarray(y).dtype, np.shape(y))
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# --- by name


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_dict_returns_the_arrays_that_were_packed(compiled):
    """A vector of one element stays a vector."""
    packed = (jax.jit(PackedDict.of) if compiled else PackedDict.of)(PARTS)
    same(dict(packed), {name: PARTS[name] for name in sorted(PARTS)})


def test_packed_dict_is_one_array():
    """Names and shapes are static, so a program compiles once."""
    packed = PackedDict.of(PARTS)
    assert [x.shape for x in jax.tree.leaves(packed)] == [(6,)]
    calls = []

    @jax.jit
    def double(packed):
        calls.append(packed.layout)
        return jax.tree.map(lambda x: 2 * x, packed)

    for _ in range(3):
        packed = double(packed)
    assert calls == [packed.layout]
    same(dict(packed), {name: 8 * PARTS[name] for name in sorted(PARTS)})


def test_equal_pytrees_are_packed_leaf_by_leaf():
    """The packed WideCounter counts and carries like each counter alone."""
    words = {"a": [2**32 - 1, 5], "b": [7]}
    parts = {name: WideCounter(jnp.zeros(len(x), jnp.uint32), jnp.asarray(x, jnp.uint32)) for name, x in words.items()}
    packed = PackedDict.of(parts | {"c": WideCounter.of(2**40 + 3)})
    assert isinstance(packed.whole, WideCounter) and packed.whole.lo.shape == (4,)
    assert int(packed["c"]) == 2**40 + 3
    same(dict(packed), parts | {"c": WideCounter.of(2**40 + 3)})

    more = PackedDict.of({"a": jnp.int32([1, 0]), "b": jnp.int32([2]), "c": jnp.int32(4)})
    after = jax.jit(lambda old, new: PackedDict(old.whole + new.whole, old.layout))(packed, more)
    counts = {name: np.asarray(x.hi, object) * 2**32 + np.asarray(x.lo, object) for name, x in after.items()}
    assert {name: x.tolist() if np.ndim(x) else int(x) for name, x in counts.items()} == {
        "a": [2**32, 5], "b": [9], "c": 2**40 + 7,
    }  # fmt: skip


# --- by row


def table(rows=5):
    """Every type and shape that environments carry, an absent and an empty one among them."""
    rng = np.random.default_rng(0)
    return {
        "q": rng.normal(size=(rows, 3)).astype(np.float32),
        "contact": rng.normal(size=(rows, 2, 2, 2)).astype(np.float32),
        "reward": np.arange(rows, dtype=np.float32),
        "half": rng.normal(size=(rows, 2)).astype(np.float16),
        "steps": np.arange(rows, dtype=np.int32) - 2,
        "small": np.arange(2 * rows, dtype=np.int8).reshape(rows, 2),
        "done": np.arange(rows) % 2 == 0,
        "key": rng.integers(0, 2**32, (rows, 2), np.uint32),
        "nothing": np.zeros((rows, 0, 3), np.float32),
        "absent": None,
        "nested": (np.float32(rng.normal(size=(rows, 1))), [np.full((rows,), 2**31, np.uint32)]),
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("index", [0, [[0, 1, 2], [4, 2, 0]], np.zeros((0,), np.int32)])
def test_packed_rows_return_the_rows_that_were_packed(index, compiled):
    """Bit for bit, in every type; the axes of the index replace the axis of the rows."""
    tree, index = table(), jnp.asarray(index)
    rows = PackedRows.of(tree)
    take = jax.jit(lambda rows, index: rows.take(index)) if compiled else PackedRows.take
    same(take(rows, index), jax.tree.map(lambda x: x[np.asarray(index)], tree))


def test_packed_rows_unpack_to_the_tree_also_with_more_leading_axes():
    tree = table()
    same(PackedRows.of(tree).unpacked(), tree)
    twice = jax.tree.map(lambda x: np.stack([x, x[::-1]]), PackedRows.of(tree)).unpacked()
    same(twice, jax.tree.map(lambda x: np.stack([x, x[::-1]]), tree))


def test_cast_rows_have_the_types_of_the_other_rows_in_the_order_of_the_tree():
    single = PackedRows.of({"x": np.float32([[1, 2], [3, 4]]), "y": np.float32([5, 6]), "z": np.int32([7, 8])})
    mixed = {"x": np.float64([[0, 0], [0, 0]]), "y": np.float32([0, 0]), "z": np.int32([0, 0])}
    with jax.enable_x64(True):
        cast = jax.jit(lambda rows: rows.cast_like(PackedRows.of(mixed)))(single)
        same(cast.unpacked(), {"x": np.float64([[1, 2], [3, 4]]), "y": np.float32([5, 6]), "z": np.int32([7, 8])})
    assert cast.shapes == PackedRows.of(mixed).shapes
