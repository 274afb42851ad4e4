"""Saving and restoring checkpoints: exact values, placement on devices, and misfits named by their path."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.io.checkpoint import Checkpoints, restore_policy

POLICY = {"params": {"hidden_0": {"kernel": np.eye(2, dtype=np.float32)}, "mean/std": np.ones(3, np.float16)}}
SYNC = CheckpointConfig(asynchronous=False)


class Moments(NamedTuple):
    mu: Any
    nu: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "opt", "rest"], meta_fields=["name"])
@dataclass(frozen=True)
class State:
    params: Any
    opt: Any
    rest: Any
    name: str = "state"


def make_state() -> State:
    with jax.enable_x64(True):
        float64 = jnp.asarray(np.array([1 / 3, 1e-300]))
    return State(
        params={"policy": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}},
        opt=Moments(mu=(jnp.float16(0.5), ()), nu=[jnp.int32(-7), None]),
        rest={
            "key": jax.random.PRNGKey(3),
            "typed": jax.random.split(jax.random.key(5), 2),
            "done": jnp.array([True, False]),
            "empty": jnp.zeros((4, 0), jnp.int32),
            "count": jnp.uint32(2**32 - 1),
            "numpy": np.arange(3.0),
            "float64": float64,
        },
    )


def as_numbers(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert type(one) is type(other)
        np.testing.assert_array_equal(as_numbers(one), as_numbers(other))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_restored_state_equals_the_saved_state(tmp_path, asynchronous):
    state = make_state()
    host = {"level": 2, "best": None, "steps": 2**40, "notes": ["a", {"b": 1.5}], "share": np.float32(0.5)}
    with Checkpoints(tmp_path, CheckpointConfig(asynchronous=asynchronous)) as checkpoints:
        assert checkpoints.save(7, state, POLICY, host)
        restored, back = checkpoints.restore(state)
    assert_same(restored, state)
    assert back == {**host, "share": 0.5}
    # A new process knows nothing of the one that saved; a template of shapes will do.
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, state)
    with Checkpoints(tmp_path, SYNC) as checkpoints:
        assert_same(checkpoints.restore(template, 7)[0], state)


def test_restored_arrays_are_placed_as_before(tmp_path):
    """So nothing compiles again."""
    state = {"free": jnp.ones(3), "bound": jax.device_put(jnp.ones(3), jax.devices()[0])}
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Checkpoints(tmp_path, SYNC) as checkpoints:
        assert checkpoints.save(0, state, POLICY, {})
        after = step(state)  # the template is donated by now
        restored, _ = checkpoints.restore(state)
    assert (restored["free"].committed, restored["bound"].committed) == (False, True)
    again = step(restored)
    assert step._cache_size() == 1
    np.testing.assert_array_equal(again["free"], after["free"])
    np.testing.assert_array_equal(step(again)["bound"], np.full(3, 3.0))


def test_restored_arrays_have_the_sharding_of_the_template(tmp_path):
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(np.array(devices), ("data",))
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
    state = {
        "env": jax.device_put(np.arange(8.0, dtype=np.float32), split),
        "w": jax.device_put(np.float32(2), whole),
        "key": jax.device_put(jax.random.split(jax.random.key(0), 2), split),
    }
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        assert checkpoints.save(1, state, POLICY, {})
        restored, _ = checkpoints.restore(state)
        one = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in state.items()}
        on_one, _ = checkpoints.restore(one)
    assert_same(restored, state)
    assert {name: x.sharding for name, x in restored.items()} == {"env": split, "w": whole, "key": split}
    assert all(len(x.sharding.device_set) == 1 for x in on_one.values())


def test_arrays_may_be_donated_right_after_saving(tmp_path):
    wipe = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with Checkpoints(tmp_path, CheckpointConfig(keep=4)) as checkpoints:
        for iteration in range(1, 4):
            state = {f"a{i}": jnp.full((200, 500), float(iteration)) for i in range(8)}
            loose = {f"n{i}": np.full((200, 500), float(iteration)) for i in range(2)}
            host = {"i": iteration}
            assert checkpoints.save(iteration, {**state, **loose}, {"w": loose["n0"]}, host)
            for _ in range(3):
                state = wipe(state)
            jax.block_until_ready(state)
            host["i"] = -1
            for array in loose.values():
                array[:] = -1
        for iteration in range(1, 4):
            restored, back = checkpoints.restore({**state, **loose}, iteration)
            assert back == {"i": iteration}
            assert all((np.asarray(x) == iteration).all() for x in restored.values())
            assert (restore_policy(tmp_path, iteration)[0]["w"] == iteration).all()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda s: s["a"].update(w=jnp.ones((4, 5))), "a/w is float32[4, 3] there and float32[4, 5] here"),
        (lambda s: s["a"].pop("w"), "a/w is float32[4, 3] there and missing here"),
        (
            lambda s: (s["a"].update(w=jnp.ones(1)), s.update(z=jnp.ones(()))),
            "a/w is float32[4, 3] there and float32[1] here (and 1 more)",
        ),
        (lambda s: s.update(k=jnp.ones((2, 2))), "k is uint32[2, 2] there and float32[2, 2] here"),
    ],
)
def test_misfit_is_named_by_its_path_before_arrays_are_read(tmp_path, monkeypatch, change, fault):
    def fresh() -> dict[str, Any]:
        key = jax.random.split(jax.random.key(0), 2)
        return {"a": {"w": jnp.ones((4, 3))}, "k": key, "n": (jnp.ones(1), jnp.zeros(0))}

    with Checkpoints(tmp_path, SYNC) as checkpoints:
        checkpoints.save(12, fresh(), POLICY, {})
        template = fresh()
        change(template)
        monkeypatch.setattr("rlstable.io.checkpoint.read_arrays", lambda *_: pytest.fail("arrays were read"))
        with pytest.raises(ConfigError) as raised:
            checkpoints.restore(template)
    assert str(raised.value) == (
        f"resume: {tmp_path}/checkpoints/12 does not fit this configuration: {fault}; "
        "resume with the configuration the folder was trained with"
    )


def test_restore_policy_needs_only_the_folder(tmp_path):
    with Checkpoints(tmp_path, CheckpointConfig(keep=3)) as checkpoints:
        for iteration, score in ((1, 4.0), (2, 6.0), (3, 5.0)):
            policy = {"params": {"w": jnp.full((2, 2), float(iteration)), "none": jnp.zeros((0, 2))}, "a/b": POLICY}
            checkpoints.save(iteration, make_state(), policy, {"policy_spec": {"i": iteration}}, score=score)
        checkpoints.wait()
        for which, expected in (("best", 2), ("latest", 3), (1, 1)):
            policy, host = restore_policy(tmp_path, which)
            assert host == {"policy_spec": {"i": expected}}
            assert type(policy["params"]["w"]) is np.ndarray
            np.testing.assert_array_equal(policy["params"]["w"], np.full((2, 2), expected, np.float32))
            assert policy["params"]["none"].shape == (0, 2)
            np.testing.assert_array_equal(policy["a/b"]["params"]["mean/std"], np.ones(3, np.float16))
    assert restore_policy(tmp_path)[1] == {"policy_spec": {"i": 2}}


def test_missing_checkpoints_are_named_in_one_line(tmp_path):
    gone = tmp_path / "gone"
    with pytest.raises(ConfigError, match=f"^{gone}/checkpoints: no checkpoint here"):
        restore_policy(gone)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/checkpoints: no checkpoint here"):
        restore_policy(tmp_path)
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind
    checkpoints = Checkpoints(tmp_path, SYNC)
    assert (checkpoints.all(), checkpoints.latest(), checkpoints.best()) == ([], None, None)
    with pytest.raises(ConfigError, match="no checkpoint here"):
        checkpoints.restore({})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="no checkpoint here"):
        checkpoints.restore({}, number=3)
    assert list(tmp_path.iterdir()) == []
    for number in (1, 2):
        assert checkpoints.save(number, {}, POLICY, {})
    with pytest.raises(ConfigError, match=r"no checkpoint 5 here; choose best, latest or one of 1, 2$"):
        restore_policy(tmp_path, 5)
    (tmp_path / "checkpoints" / "7").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match=r"no checkpoint 7 here; choose best, latest or one of 1, 2$"):
        checkpoints.restore({}, number=7)
    checkpoints.close()
