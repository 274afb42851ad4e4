"""The precision ladder: exact sequences of steps up and down, without training."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlstable.config.schema import ConfigError, validate
from rlstable.config.supervise import LadderConfig, SuperviseConfig
from rlstable.supervise.ladder import Ladder, LadderMemory, Level, NeedsOwnProgram, PrecisionSigns

FINE = PrecisionSigns(False, 0.0, 0.0, False)
STORM = PrecisionSigns(False, 0.5, 0.0, False)
OVERFLOW = PrecisionSigns(False, 0.0, 0.0, True)
REJECTED = PrecisionSigns(False, 0.0, 0.5, False)


def ladder(
    start: tuple[str, str] = ("default", "float32"),
    memory: LadderMemory | None = None,
    distinct: Any = None,
    **fields: Any,
) -> Ladder:
    config = validate(LadderConfig, {"patience": 2, "down_after": 3} | fields)
    return Ladder(
        config, Level(*start), LadderMemory() if memory is None else memory, distinct or (lambda levels: levels)
    )


def changes(own: Ladder, signs: list[PrecisionSigns]) -> list[str | None]:
    found = [own.watch(sign) for sign in signs]
    return [None if change is None else f"{change.to} ({change.cause})" for change in found]


def test_healthy_run_stays_at_its_level_and_measures_nothing() -> None:
    def never(levels: tuple[str, ...]) -> tuple[str, ...]:
        raise AssertionError("measured without need")

    own = ladder(distinct=never)
    assert changes(own, [FINE] * 10) == [None] * 10
    assert own.level == Level("default", "float32")


def test_lasting_trouble_climbs_to_the_top_and_back_if_there_is_no_relief() -> None:
    own = ladder()
    assert changes(own, [STORM] * 10) == [
        None, "high/float32 (quarantine)", None, "highest/float32 (quarantine)", None, "x64/float32 (quarantine)",
        None, "default/float32 (no_relief)", None, None,
    ]  # fmt: skip
    assert own.memory.futile
    assert not own.can_climb()


def test_single_bad_iterations_do_not_climb() -> None:
    assert changes(ladder(), [STORM, FINE, STORM, FINE, FINE, STORM]) == [None] * 6


def test_levels_of_equal_accuracy_are_skipped() -> None:
    own = ladder(distinct=lambda levels: tuple(level for level in levels if level in ("default", "x64")))
    assert changes(own, [STORM] * 2) == [None, "x64/float32 (quarantine)"]


def test_ladder_steps_down_one_level_and_waits_longer_after_a_mistake() -> None:
    """A fault below x64 that never ends: 3 healthy iterations, then 6, then 12."""
    own = ladder(distinct=lambda levels: ("default", "x64"))
    stretches, healthy = [], 0
    for _ in range(40):
        change = own.watch(FINE if own.level.matmul == "x64" else STORM)
        healthy = healthy + 1 if own.level.matmul == "x64" else healthy
        if change is not None and change.cause == "healthy":
            stretches.append(healthy + 1)
            healthy = 0
        elif change is not None:
            healthy = 0
    assert stretches == [3, 6, 12]


@pytest.mark.parametrize("signs", [OVERFLOW, REJECTED, PrecisionSigns(True, 0.0, 0.0, False)], ids=str)
def test_trouble_of_learning_raises_the_precision_of_networks_first(signs: PrecisionSigns) -> None:
    own = ladder(("default", "float16"), matmul=["default", "highest"])
    assert [change.split()[0] if change else None for change in changes(own, [signs] * 4)] == [
        None, "default/float32", None, "highest/float32",
    ]  # fmt: skip


def test_trouble_of_simulations_raises_the_precision_of_products_first() -> None:
    own = ladder(("default", "bfloat16"), matmul=["default", "highest"])
    assert changes(own, [STORM] * 4)[1::2] == ["highest/bfloat16 (quarantine)", "highest/float32 (quarantine)"]


def test_float16_networks_can_climb_to_bfloat16() -> None:
    own = ladder(("default", "float16"), network=["bfloat16", "float32"])
    assert changes(own, [OVERFLOW] * 4)[1::2] == ["default/bfloat16 (loss_scale)", "default/float32 (loss_scale)"]


def test_ladder_starts_at_the_configured_level() -> None:
    own = ladder(("highest", "float32"))
    assert changes(own, [STORM] * 2)[1] == "x64/float32 (quarantine)"
    assert changes(own, [FINE] * 6) == [None, None, "highest/float32 (healthy)", None, None, None]


@pytest.mark.parametrize("share", [float("nan"), 1.0])
def test_shares_of_nan_and_one_are_trouble(share: float) -> None:
    assert changes(ladder(patience=1), [PrecisionSigns(False, share, 0.0, False)])[0] is not None
    assert changes(ladder(patience=1), [PrecisionSigns(False, 0.0, share, False)])[0] is not None


def test_ladder_that_is_off_never_moves() -> None:
    own = ladder(enabled=False)
    assert changes(own, [STORM] * 20) == [None] * 20
    assert own.climb("remedy") is None and not own.can_climb()


@given(st.lists(st.sampled_from([FINE, STORM, REJECTED]), max_size=60), st.integers(0, 60))
def test_resumed_ladder_decides_like_the_uninterrupted_one(signs: list[PrecisionSigns], cut: int) -> None:
    whole = ladder(("default", "bfloat16"))
    expected = changes(whole, signs)
    first = ladder(("default", "bfloat16"))
    found = changes(first, signs[:cut])
    saved = json.loads(json.dumps(dataclasses.asdict(first.memory)))
    second = ladder(("default", "bfloat16"), LadderMemory(**saved))
    assert second.level == first.level
    assert found + changes(second, signs[cut:]) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"matmul": ["x64", "default"]},
            "ladder.matmul: [x64, default] must be in rising order without repeats: default, high, highest, x64",
        ),
        ({"matmul": ["default", "default"]}, "ladder.matmul: [default, default] must be in rising order"),
        ({"network": ["float32", "bfloat16"]}, "ladder.network: [float32, bfloat16] must be in rising order"),
        ({"network": ["float64"]}, "ladder.network.0: input should be 'bfloat16' or 'float32', got 'float64'"),
        ({"patience": 0}, "ladder.patience: input should be greater than 0, got 0"),
        ({"max_invalid": 2.0}, "ladder.max_invalid: input should be less than or equal to 1, got 2.0"),
    ],
)  # fmt: skip
def test_invalid_ladder_setting_is_a_one_line_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(SuperviseConfig, {"ladder": fields})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("signs", [OVERFLOW, REJECTED], ids=["loss scale", "rejected"])
def test_trouble_of_networks_does_not_climb_to_x64(signs: PrecisionSigns) -> None:
    """Networks stay float32 there; trouble of simulations still climbs to x64."""
    own = ladder(distinct=lambda levels: ("default", "highest", "x64"))
    assert changes(own, [signs] * 6) == [None, f"highest/float32 ({own._cause(signs)})", None, None, None, None]
    assert not own.memory.futile
    assert changes(own, [STORM] * 2)[1] == "x64/float32 (quarantine)"


@pytest.mark.parametrize(
    ("signs", "what"),
    [(STORM, "matrix products, for the cause quarantine"), (REJECTED, "networks, for the cause rejected")],
)
def test_ladder_of_a_shared_program_refuses_to_climb_and_keeps_its_level(signs: PrecisionSigns, what: str) -> None:
    own = dataclasses.replace(ladder(("default", "bfloat16"), matmul=["default", "highest"]), shared=True)
    assert own.watch(signs) is None
    before = dataclasses.replace(own.memory, troubled=0)
    with pytest.raises(NeedsOwnProgram, match=what):
        own.watch(signs)
    assert own.memory == before
    assert own.level == Level("default", "bfloat16")
    assert own.can_climb()


def test_ladder_of_a_shared_program_with_one_level_refuses_nothing() -> None:
    own = dataclasses.replace(ladder(distinct=lambda levels: ("default",)), shared=True)
    assert changes(own, [STORM] * 4) == [None] * 4
