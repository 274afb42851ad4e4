"""Configuration of a robot's task: lists of terms over a model that an MJCF file describes (`env=robot`).

A term has a name of the lists in `rlstable.robot`, or `term: package.module:function`. The parameters of its function
stand beside the keys that all terms of a list have; `rlstable.robot.terms` checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer

from rlstable.config.curriculum import Curriculum, OrCurriculum
from rlstable.config.schema import Count, CountOrZero, Finite, Flag, NonNegative, Positive, Section, Share, require

# Prefixes of a robot's name in the package of this name, and in the packages of MuJoCo Menagerie.
DESCRIPTIONS, MENAGERIE = "robot_descriptions:", "menagerie:"
NAMED = (DESCRIPTIONS, MENAGERIE)


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    low, high = pair
    if low > high:
        raise ValueError(f"[{low:g}, {high:g}] is reversed; write the lower number first: [{high:g}, {low:g}]")
    return pair


Range = Annotated[tuple[Finite, Finite], AfterValidator(_ordered)]
GrowingRange = Annotated[tuple[float, float] | Curriculum, OrCurriculum(Range)]
Growing = Annotated[float | Curriculum, OrCurriculum(NonNegative)]
Steps = Annotated[tuple[CountOrZero, CountOrZero], AfterValidator(_ordered)]


class TermConfig(Section):
    """A term: its function and the parameters of this function."""

    model_config = ConfigDict(frozen=True, extra="allow")
    term: Annotated[str, Field(min_length=1)] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    def path(self, name: str) -> str:
        """The name of the function: a term of rlstable, or `package.module:function`."""
        return self.term or name


def _without_null(terms: object) -> object:
    """A list of terms without those that `null` removes, so that a file can inherit the others."""
    return {key: term for key, term in terms.items() if term is not None} if isinstance(terms, Mapping) else terms


Kind = TypeVar("Kind", bound=TermConfig)
Terms = Annotated[dict[str, Kind], BeforeValidator(_without_null)]


class ObservationConfig(TermConfig):
    """A part of the observation."""

    scale: Finite = 1.0
    noise: Growing = 0.0
    clip: Positive | None = None
    history: Count = 1
    delay: Steps = (0, 0)


class RewardConfig(TermConfig):
    """A part of the reward."""

    weight: Finite


class CommandConfig(TermConfig):
    """A command that the policy follows."""

    resample: Positive | None = None


class ScaleConfig(Section):
    """Share of an actuator's range on the action's side of home that an action of 1 or -1 adds to its control.

    `force` is the largest share of a position servo's force that an action asks for with the joint at home.
    """

    position: Positive
    velocity: Positive
    torque: Positive
    force: Positive | None


def _of_all_joints(numbers: object) -> object:
    return numbers if numbers is None or isinstance(numbers, Mapping) else {"*": numbers}


def _as_written(numbers: Mapping[str, float] | None) -> object:
    return numbers["*"] if numbers is not None and [*numbers] == ["*"] else numbers


_ForJoints = (BeforeValidator(_of_all_joints), PlainSerializer(_as_written))


class ActionConfig(Section):
    """The meaning of an action. Gains are by patterns of joint names; a number is that of all joints."""

    control: Literal["auto", "position", "velocity", "torque"]
    scale: ScaleConfig
    stiffness: Annotated[dict[str, Positive] | None, *_ForJoints]
    damping: Annotated[dict[str, NonNegative] | None, *_ForJoints]
    force: Annotated[dict[str, Positive] | None, *_ForJoints]
    clip: Positive | None
    delay: Steps
    filter: Annotated[Share, Field(lt=1)]

    def _check(self) -> None:
        for key in ("stiffness", "damping"):
            servo = self.control in ("position", "velocity") or getattr(self, key) is None
            require(servo, key, "needs control=position or control=velocity; auto keeps the model's own gains")
        converts = self.control != "auto" or self.force is None
        require(converts, "force", "needs another control than auto, which keeps the model's own forces")


class PushConfig(Section):
    """Pushes of the root body."""

    every: Positive
    speed: Growing


def _positive(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] <= 0:
        raise ValueError(f"[{pair[0]:g}, {pair[1]:g}] are factors; both must be above 0")
    return pair


Factors = Annotated[Range, AfterValidator(_positive)]


class RandomizationConfig(Section):
    """Ranges from which each environment draws factors for its model."""

    mass: Factors | None
    center_of_mass: Positive | None
    friction: Factors | None
    damping: Factors | None
    armature: Factors | None
    gains: Factors | None
    gravity: Factors | None


class TileConfig(Section):
    """A kind of tile: its share of the columns, and its number on the easiest and on the hardest level."""

    weight: Positive = 1.0
    range: Annotated[tuple[NonNegative, NonNegative], AfterValidator(_ordered)] | None = None


Tile = Literal["flat", "rough", "slope", "blocks", "stairs_up", "stairs_down", "gaps", "stones"]


class TerrainConfig(Section):
    """Uneven ground, in tiles."""

    tiles: Annotated[dict[Tile, TileConfig], BeforeValidator(_without_null)]
    levels: Count
    columns: Count
    size: Positive
    platform: Positive
    resolution: Positive
    curriculum: Flag
    seed: CountOrZero

    def _check(self) -> None:
        require(self.tiles, "tiles", "is empty; name at least one kind")
        for name, tile in self.tiles.items():
            require(name == "flat" or tile.range, "tiles", f"{name} needs a range, [least, greatest]")
        require(2 * self.platform <= self.size, "platform", f"must be at most half of size={self.size:g}")
        require(4 * self.resolution <= self.platform, "resolution", f"must be at most platform/4={self.platform / 4:g}")


class PhysicsConfig(Section):
    """Cheaper physics while the robot learns; None is the model's own, with which exported policies are played."""

    timestep: Positive | None = None
    cone: Literal["pyramidal", "elliptic"] | None = None
    contacts: Literal["feet"] | None = None


class TaskConfig(Section):
    """The task of a robot."""

    keyframe: str | None
    home: dict[str, Finite] | None
    free_base: Flag
    root: str | None
    floor: Literal["auto", "always", "never"]
    terrain: TerrainConfig | None
    control_dt: Positive
    physics: PhysicsConfig
    observations: Terms[ObservationConfig]
    critic_observations: Terms[ObservationConfig]
    actions: ActionConfig
    commands: Terms[CommandConfig]
    rewards: Terms[RewardConfig]
    endings: Terms[TermConfig]
    reset: Terms[TermConfig]
    pushes: PushConfig | None
    randomization: RandomizationConfig

    @property
    def is_randomized(self) -> bool:
        return any(value is not None for _, value in self.randomization)

    def _check(self) -> None:
        for key in ("observations", "rewards"):
            require(getattr(self, key), key, "is empty; name at least one term")
        require(self.terrain is None or self.floor != "never", "terrain", "is a floor, and floor=never; set floor=auto")
        step = self.physics.timestep or self.control_dt
        whole = round(self.control_dt / step) * step
        require(abs(whole - self.control_dt) < 1e-6, "physics.timestep", f"must divide control_dt={self.control_dt:g}")
        resets = len(self.reset)
        require(resets == 1, "reset", f"has {resets} terms; it must have one, and null in the place of each other")

    @property
    def own_functions(self) -> list[str]:
        """Import paths of the user's own terms."""
        lists: tuple[Mapping[str, TermConfig], ...] = (
            self.observations, self.critic_observations, self.commands, self.rewards, self.endings, self.reset,
        )  # fmt: skip
        paths = {term.path(name) for terms in lists for name, term in terms.items()}
        return sorted(path for path in paths if ":" in path)
