"""Uneven ground: one height field of tiles, whose rows are ever harder, and a level that each robot has.

The world's origin lies on flat ground beside the first row, so that a robot at home stands there as on a floor. Tiles
meet at height 0. Heights are a function of the configuration alone, so that every process and MJX and C MuJoCo have the
same ground.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct

from rlstable.config import ConfigError
from rlstable.config.robot import TerrainConfig, Tile

TERRAIN = "rlstable_terrain"  # geom and height field
_DEPTH = 1.0  # m, of gaps and between stones
_TREAD, _STONE, _BLOCK = 0.3, 0.5, (0.4, 1.2)  # m: of stairs, of stepping stones, sides of blocks
_EDGE = 0.3  # m at height 0 along the edges of a tile
_FAR = 0.5  # share of a tile's side; a robot that gets so far from its centre goes up a level
_REPEATED = 98  # folds the key of an episode into the one that draws the level of a robot that has passed the last


class Levels(struct.PyTreeNode):
    """The place of one robot in the curriculum, which outlives its episodes.

    Attributes:
        level: Row of tiles, int32.
        column: Column of tiles, int32.
        walked: Distance from the tile's centre at the last step, in m.
        fell: Whether that step ended the episode by a failure.
    """

    level: jax.Array
    column: jax.Array
    walked: jax.Array
    fell: jax.Array


class _Samples:
    """The samples of one tile: distances from its centre, in m, and whether a place is on the flat platform there."""

    def __init__(self, config: TerrainConfig, spacing: float, random: np.random.Generator):
        count = round(config.size / spacing) + 1
        along = np.linspace(-config.size / 2, config.size / 2, count)
        self.x, self.y = np.meshgrid(along, along, indexing="ij")
        self.apart = np.maximum(np.abs(self.x), np.abs(self.y))
        self.half, self.platform, self.random = config.size / 2, config.platform / 2, random
        self.open = (self.apart > self.platform) & (self.apart < self.half - _EDGE)
        self.ring = np.clip(np.floor((self.apart - self.platform) / _TREAD) + 1, 0, self.rings)

    @property
    def rings(self) -> int:
        """Number of steps of stairs between the platform and the edge."""
        return max(1, int((self.half - self.platform - _EDGE) / _TREAD))


def _flat(tile: _Samples, value: float) -> np.ndarray:
    return np.zeros_like(tile.x)


def _rough(tile: _Samples, value: float) -> np.ndarray:
    return np.where(tile.open, tile.random.uniform(-value, value, tile.x.shape), 0.0)


def _slope(tile: _Samples, value: float) -> np.ndarray:
    up = tile.random.choice((-1.0, 1.0))
    return np.asarray(up * value * (tile.half - np.maximum(tile.apart, tile.platform)))


def _blocks(tile: _Samples, value: float) -> np.ndarray:
    heights = np.zeros_like(tile.x)
    for _ in range(round(4 * tile.half**2)):
        (x, y), (a, b) = tile.random.uniform(-tile.half, tile.half, 2), tile.random.uniform(*_BLOCK, 2) / 2
        inside = (np.abs(tile.x - x) <= a) & (np.abs(tile.y - y) <= b)
        heights[inside] = tile.random.uniform(-value, value)
    return np.where(tile.open, heights, 0.0)


def _stairs_down(tile: _Samples, value: float) -> np.ndarray:
    return np.asarray(value * (tile.rings - tile.ring))


def _stairs_up(tile: _Samples, value: float) -> np.ndarray:
    return -_stairs_down(tile, value)


def _gaps(tile: _Samples, value: float) -> np.ndarray:
    beyond = (tile.apart - tile.platform) % (value + 2 * _STONE)
    return np.where(tile.open & (beyond < value), -_DEPTH, 0.0)


def _stones(tile: _Samples, value: float) -> np.ndarray:
    between = ((tile.x % (_STONE + value)) >= _STONE) | ((tile.y % (_STONE + value)) >= _STONE)
    return np.where(tile.open & between, -_DEPTH, 0.0)


KINDS: dict[Tile, Callable[[_Samples, float], np.ndarray]] = {
    "flat": _flat, "rough": _rough, "slope": _slope, "blocks": _blocks, "stairs_up": _stairs_up,
    "stairs_down": _stairs_down, "gaps": _gaps, "stones": _stones,
}  # fmt: skip


class Terrain:
    """The ground that a configuration describes.

    Attributes:
        heights: In m, `[nx, ny]`.
        centers: Of the tiles, on the ground, relative to the origin, `[levels, columns, 3]`.
        kinds: Of the columns.
    """

    def __init__(self, config: TerrainConfig):
        self.config = config
        count = round(config.size / config.resolution)
        self.spacing = config.size / count
        rows, columns = config.levels * count + 1, config.columns * count + 1
        self.heights = np.zeros((rows + 2 * count, columns + 2 * count), np.float32)
        self._start = np.array([-1.5 * config.size, -(config.columns / 2 + 1) * config.size])
        self.kinds = _kinds(config)
        random = np.random.default_rng(config.seed)
        self.centers = np.zeros((config.levels, config.columns, 3), np.float32)
        for level in range(config.levels):
            share = level / max(config.levels - 1, 1)
            for column, kind in enumerate(self.kinds):
                low, high = config.tiles[kind].range or (0.0, 0.0)
                tile = KINDS[kind](_Samples(config, self.spacing, random), low + share * (high - low))
                first = np.array([level + 1, column + 1]) * count
                self.heights[first[0] : first[0] + count + 1, first[1] : first[1] + count + 1] = tile
                middle = self._start + (first + count / 2) * self.spacing
                self.centers[level, column] = (*middle, tile[count // 2, count // 2])

    def add(self, spec: mujoco.MjSpec, floor: float) -> None:
        """Replaces the planes of a model by this ground, whose height 0 is at the height `floor`."""
        for geom in [geom for geom in spec.geoms if geom.type == mujoco.mjtGeom.mjGEOM_PLANE]:
            spec.delete(geom)
        low, high = float(np.min(self.heights)), float(np.max(self.heights))
        half = self.spacing * (np.array(self.heights.shape) - 1) / 2
        nx, ny = self.heights.shape
        spec.add_hfield(
            name=TERRAIN, size=[*half, max(high - low, 1e-3), _DEPTH], nrow=ny, ncol=nx,
            userdata=self.heights.T.ravel().tolist(),
        )  # fmt: skip
        every = 2**31 - 1  # collides with every geom that collides with anything
        spec.worldbody.add_geom(
            name=TERRAIN, type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname=TERRAIN,
            pos=[*(self._start + half), floor + low], contype=every, conaffinity=every, rgba=[0.6, 0.65, 0.7, 1],
        )  # fmt: skip

    def height(self, places: jax.Array) -> jax.Array:
        """Height of the ground at `[..., 2]`, of the nearest sample."""
        index = jnp.round((places - jnp.asarray(self._start, jnp.float32)) / self.spacing).astype(int)
        index = jnp.clip(index, 0, np.array(self.heights.shape) - 1)
        return jnp.asarray(self.heights)[index[..., 0], index[..., 1]]

    def drawn(self, key: jax.Array) -> Levels:
        """Any tile, all equally likely."""
        key_level, key_column = jax.random.split(key)
        level = jax.random.randint(key_level, (), 0, self.config.levels)
        column = jax.random.randint(key_column, (), 0, self.config.columns)
        return Levels(level, column, jnp.zeros(()), jnp.zeros((), bool))

    def next(self, levels: Levels, key: jax.Array) -> Levels:
        """The place of a robot in its next episode.

        One that got far goes up a level, one that fell goes down. One that has passed the last level is drawn any, so
        that it does not forget the others (Rudin et al. 2021, arXiv:2109.11978).
        """
        up = (levels.walked > _FAR * self.config.size) & ~levels.fell
        level = jnp.maximum(levels.level + up.astype(jnp.int32) - levels.fell.astype(jnp.int32), 0)
        any_level = jax.random.randint(jax.random.fold_in(key, _REPEATED), (), 0, self.config.levels)
        level = jnp.where(level < self.config.levels, level, any_level)
        return Levels(level, levels.column, jnp.zeros(()), jnp.zeros((), bool))

    def center(self, levels: Levels) -> jax.Array:
        """The centre of a robot's tile, `[3]`."""
        return jnp.asarray(self.centers)[levels.level, levels.column]

    def check(self, radius: float, floating: bool) -> None:
        """Raises ConfigError for a robot that does not fit onto a platform, or that stays where it is."""
        platform = self.config.platform
        if not floating:
            raise ConfigError("env.task.terrain: needs a root body with a free joint; set env.task.terrain=null")
        if 2 * radius > platform:
            raise ConfigError(
                f"env.task.terrain.platform: the robot is {2 * radius:.2g} m wide, and a platform {platform:g} m; set "
                f"env.task.terrain.platform={np.ceil(20 * radius + 2) / 10:g}, and size to twice of that or more"
            )

    @property
    def header(self) -> str:
        counts = [f"{self.kinds.count(kind)} {kind}" for kind in dict.fromkeys(self.kinds)]
        return f"{self.config.levels} levels of {self.config.columns} tiles: {', '.join(counts)}"


def _kinds(config: TerrainConfig) -> list[Tile]:
    """The kinds of the columns, by weight; a ConfigError if a kind gets none."""
    names: list[Tile] = list(config.tiles)
    ends = np.cumsum([config.tiles[name].weight for name in names])
    middles = (np.arange(config.columns) + 0.5) / config.columns * ends[-1]
    kinds = [names[i] for i in np.searchsorted(ends, middles)]
    missing = [name for name in names if name not in kinds]
    if missing:
        raise ConfigError(
            f"env.task.terrain.columns: {config.columns} columns leave none for {', '.join(missing)}; "
            "raise it, or the weight, or set the tile to null"
        )
    return kinds
