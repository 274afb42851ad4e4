"""Uneven ground: tiles that meet at height 0, scans of it, and levels that outlive episodes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from moments import config
from toys import mesh

from rlstable.config.robot import TerrainConfig
from rlstable.device.trees import PRESERVED
from rlstable.envs.load import load
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.robot.environment import LEVEL, PAST
from rlstable.robot.observations import scan_grid
from rlstable.robot.terrain import KINDS, Levels, Terrain
from rlstable.runner.setup import TrainingSetup

pytestmark = pytest.mark.usefixtures("quick_compile")

EVERY = {kind: {"weight": 1.0, "range": (0.05, 0.2)} for kind in KINDS}
SMALL = (
    "env.task.terrain.levels=3", "env.task.terrain.size=4", "env.reset_pool_size=4",
)  # fmt: skip


def terrain(**more: Any) -> Terrain:
    settings: dict[str, Any] = {
        "tiles": EVERY, "levels": 3, "columns": 8, "size": 8.0, "platform": 2.0, "resolution": 0.1, "curriculum": True,
        "seed": 0,
    }  # fmt: skip
    return Terrain(TerrainConfig(**{**settings, **more}))


@functools.cache
def rough(*words: str) -> Any:
    return load(config("robot_rough", "quadruped", "env.backend=native", *SMALL, *words).env).env


def tile_of(ground: Terrain, level: int, column: int) -> np.ndarray:
    """The samples of a tile, with those on its edges."""
    first = (np.array([level, column]) + 1) * 80
    return ground.heights[first[0] : first[0] + 81, first[1] : first[1] + 81]


def levels(level: int, walked: float, fell: bool) -> Levels:
    return Levels(jnp.int32(level), jnp.int32(1), jnp.float32(walked), jnp.array(fell))


def test_tiles_meet_at_height_zero_and_their_platforms_are_flat() -> None:
    ground = terrain()
    assert ground.heights.shape == ((3 + 2) * 80 + 1, (8 + 2) * 80 + 1)
    for level in range(3):
        for column in range(8):
            tile = tile_of(ground, level, column)
            np.testing.assert_allclose([tile[0], tile[-1], tile[:, 0], tile[:, -1]], 0.0, atol=1e-6)
            np.testing.assert_allclose(tile[31:50, 31:50], ground.centers[level, column, 2], atol=1e-6)
    border = ground.heights[:80]
    assert not border.any() and float(ground.height(jnp.zeros(2))) == 0.0


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("flat", 0.0, 0.0), ("rough", -0.2, 0.2), ("slope", -0.6, 0.6), ("blocks", -0.2, 0.2), ("stairs_up", -1.8, 0.0),
        ("stairs_down", 0.0, 1.8), ("gaps", -1.0, 0.0), ("stones", -1.0, 0.0),
    ],
)  # fmt: skip
def test_hardest_tile_has_the_greatest_number_of_its_range(kind: str, low: float, high: float) -> None:
    ground = terrain()
    tile = tile_of(ground, 2, ground.kinds.index(kind))
    assert (low - 1e-6 <= tile).all() and (tile <= high + 1e-6).all()
    assert kind == "flat" or max(tile.max() / (high or 1), tile.min() / (low or 1)) > 0.95
    assert kind != "stairs_up" or np.allclose(np.diff(np.unique(tile)), 0.2)


def test_same_seed_makes_the_same_ground_and_another_seed_another() -> None:
    assert (terrain().heights == terrain().heights).all()
    assert (terrain().heights != terrain(seed=1).heights).any()


def test_columns_follow_the_weights() -> None:
    tiles = {"flat": {"weight": 1}, "stairs_up": {"weight": 3, "range": (0, 0.1)}}
    assert terrain(tiles=tiles).kinds == ["flat"] * 2 + ["stairs_up"] * 6


def test_scan_is_what_rays_find_and_turns_with_the_robot() -> None:
    env = rough().unwrapped
    robot, grid = env.robot, scan_grid(0.8, 0.4, 0.1)
    assert grid.shape == (9, 5, 2)
    for turn in (0, 1):  # a quarter of a turn each keeps the points on samples of the height field
        qpos = np.array(robot.home)
        qpos[:3] += robot.terrain.centers[2, 6]
        qpos[0] += 1.2
        qpos[3:7] = np.cos(turn * np.pi / 4), 0, 0, np.sin(turn * np.pi / 4)
        data = robot.forward(qpos)
        found = np.asarray(robot.scanned(data, grid)).reshape(9, 5)
        raw = mujoco.MjData(robot.model)
        raw.qpos[:] = qpos
        mujoco.mj_forward(robot.model, raw)
        field, down = robot.model.geom("rlstable_terrain").id, np.array([0.0, 0.0, -1.0])
        for (i, j), height in np.ndenumerate(found):
            x, y = grid[i, j] if turn == 0 else (-grid[i, j, 1], grid[i, j, 0])
            start = np.array([qpos[0] + x, qpos[1] + y, 3.0]) + 1e-5  # not on an edge of two triangles
            ground = start[2] - mujoco.mj_rayHfield(robot.model, raw, field, start, down)
            assert height == pytest.approx(ground - (qpos[2] - robot.home_height), abs=2e-3)
        assert np.ptp(found) > 0.1


@pytest.mark.parametrize(
    ("level", "walked", "fell", "expected"),
    [(0, 0.0, True, 0), (1, 0.0, True, 0), (1, 3.9, False, 1), (1, 4.1, False, 2), (1, 4.1, True, 0)],
)
def test_robot_goes_up_after_half_a_tile_and_down_after_a_fall(
    level: int, walked: float, fell: bool, expected: int
) -> None:
    following = terrain().next(levels(level, walked, fell), jax.random.PRNGKey(0))
    assert (int(following.level), int(following.column)) == (expected, 1)
    assert (float(following.walked), bool(following.fell)) == (0.0, False)


def test_robot_that_has_passed_the_last_level_is_drawn_any() -> None:
    keys = jax.random.split(jax.random.PRNGKey(0), 50)
    drawn = jax.vmap(lambda key: terrain().next(levels(2, 5.0, False), key).level)(keys)
    assert set(np.asarray(drawn).tolist()) == {0, 1, 2}


def test_level_outlives_episodes_and_the_robot_starts_on_its_tile() -> None:
    vector = VectorEnv(rough(), 3, 1, {}, reset_from_pool=True, restore_info=True)
    reset = jax.jit(vector.reset)
    state = reset(jax.random.split(jax.random.PRNGKey(0), 4))
    pool = jax.device_put(pool_of(reset(jax.random.split(jax.random.PRNGKey(7), 4))))
    state, own = vector.begin(state, pool), state.info[PRESERVED]
    step = jax.jit(lambda s, k: vector.step(s, jnp.zeros((4, 12)), pool, k, {}).state)
    for i in range(4):  # the fourth step is the first of the second episode
        state = step(state, jax.random.PRNGKey(i))
    np.testing.assert_array_equal(state.info[PRESERVED].column, own.column)
    np.testing.assert_array_equal(state.info[PRESERVED].level, own.level)  # no robot fell or got far
    ground = vector.env.unwrapped.robot.terrain
    np.testing.assert_allclose(state.info[PAST].center, ground.centers[own.level, own.column])
    np.testing.assert_allclose(state.data.qpos[:, :2], ground.centers[own.level, own.column][:, :2], atol=0.1)
    np.testing.assert_array_equal(state.metrics[LEVEL], own.level)


def test_reset_of_all_environments_keeps_their_levels_unless_they_are_bad() -> None:
    settings = config("robot_rough", "quadruped", *SMALL, "ppo.num_envs=8", "ppo.batch_size=8", "env.backend=native")
    setup = TrainingSetup(settings, mesh(1))
    state = setup.first_state(jax.random.PRNGKey(0), jax.random.PRNGKey(1), settings.fault)
    before = jax.device_get(state.env_state.info[PRESERVED])
    bad = before.replace(walked=np.where(np.arange(8) == 2, np.float32(np.nan), before.walked))
    env_state = state.env_state.replace(info={**state.env_state.info, PRESERVED: bad})
    state = dataclasses.replace(state, env_state=env_state)
    after = jax.device_get(setup.reset_envs(state, jax.random.PRNGKey(5)).env_state.info)
    good = np.arange(8) != 2  # a bad value would survive every rollback
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[good], y[good]), after[PRESERVED], before)
    assert np.isfinite(after[PRESERVED].walked).all()
    assert (after[PAST].center != jax.device_get(state.env_state.info[PAST].center)).any()


def test_mirror_image_of_a_scan_has_its_sides_exchanged() -> None:
    env = rough().unwrapped
    mirror, reason = env.mirror("if_symmetric", 1)
    assert reason is None and mirror is not None
    parts = env.observers["state"].parts
    start = sum(part.size for part in parts[: [part.name for part in parts].index("height_scan")])
    order = np.asarray(mirror.observations["state"].order)[start : start + 77].reshape(11, 7) - start
    np.testing.assert_array_equal(order, np.arange(77).reshape(11, 7)[:, ::-1])
