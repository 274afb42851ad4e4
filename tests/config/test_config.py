"""Bad configurations are rejected with one line that begins with the key and says what is allowed."""

from __future__ import annotations

import copy
import itertools
import math
import re
import types
import typing
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlstable.config import Config, ConfigError, load
from rlstable.config.robot import TaskConfig
from rlstable.config.schema import Section, unknown_key

MINIMAL = {"env": {"name": "fast"}}
# An error message says what is allowed with at least one of these.
ALLOWED = re.compile(r"should|must|needs|would fit|did you mean|allowed here|set it|leave it out|lower it")
NAN, INF = float("nan"), float("inf")


def with_values(changes: dict[str, Any], start: dict[str, Any] = MINIMAL) -> dict[str, Any]:
    """`start` with values at dotted keys."""
    data = copy.deepcopy(start)
    for key, value in changes.items():
        section = data
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return data


def refusal(changes: dict[str, Any], key: str | None = None) -> str:
    """The message of the error about a change, after its key."""
    with pytest.raises(ConfigError) as refused:
        load(with_values(changes))
    text = str(refused.value)
    key = next(iter(changes)) if key is None else key
    assert "\n" not in text and text.strip() == text
    named, message = text.split(": ", 1)
    assert named == key
    assert ALLOWED.search(message), text
    return message


class Leaf(typing.NamedTuple):
    """A key that holds a value."""

    key: str
    kinds: frozenset[Any]
    nullable: bool


def kinds_of(annotation: Any) -> set[Any]:
    """The plain types in an annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kinds_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*(kinds_of(a) for a in arguments))
    if origin is None:
        return {annotation}
    return {origin}


def leaves(section: type[Section], prefix: str = "") -> list[Leaf]:
    """Every key of the configuration, so that no new one is forgotten."""
    found = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += leaves(field.annotation, f"{prefix}{name}.")
        else:
            kinds = kinds_of(field.annotation)
            found.append(Leaf(prefix + name, frozenset(kinds - {type(None)}), type(None) in kinds))
    return found


LEAVES = leaves(Config)
KEYS = {leaf.key: leaf for leaf in LEAVES}
# A number or its name, tested separately.
MIXED = {"fault.value": {float, typing.Literal}}
KNOWN_KINDS = {float, int, bool, str, tuple, dict, typing.Literal, TaskConfig}  # tests/robot checks its keys


def of_kind(kind: Any) -> list[str]:
    return [leaf.key for leaf in LEAVES if {kind} == leaf.kinds]


def sections(section: type[Section] = Config, prefix: str = "") -> list[tuple[str, type[Section]]]:
    found = [(prefix, section)]
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += sections(field.annotation, f"{prefix}{name}.")
    return found


# --- every key


def test_every_key_of_the_configuration_is_of_a_tested_kind():
    assert {leaf.key: leaf.kinds for leaf in LEAVES if len(leaf.kinds) != 1} == MIXED
    assert set().union(*(leaf.kinds for leaf in LEAVES)) <= KNOWN_KINDS
    assert len(LEAVES) > 80
    assert KEYS["ppo.max_grad_norm"].nullable and not KEYS["ppo.learning_rate"].nullable


def test_real_numbers_must_be_finite_in_float32():
    for key in of_kind(float):
        for bad in (INF, NAN, 1e39, 10**400, True, "1e-3", [1.0], {}, 1j):
            refusal({key: bad})
        if key not in ("eval.target_return", "guards.policy.min_entropy"):
            refusal({key: -1.0})
    assert "greater than 0" in refusal({"ppo.learning_rate": 0})


def test_integers_must_be_whole_and_not_negative():
    for key in of_kind(int):
        for bad in (INF, NAN, 1.5, True, "3", [3], -1, -(10**30)):
            refusal({key: bad})


def test_sizes_must_fit_an_int32_index():
    """A larger size would be an OverflowError while tracing. Totals are counted in 64 bits."""
    for key, large in itertools.product(of_kind(int), (2**31, 2**63, 10**30)):
        if key == "ppo.normalize_until_count" or (key in ("total_steps", "seed", "fault.seed") and large < 2**32):
            continue
        if key == "total_steps" and large < 2**64:
            assert load(with_values({key: large})).total_steps == large
        else:
            refusal({key: large})


ZERO_HAS_A_MEANING = {
    "env.reset_pool_refresh", "ppo.num_resets_per_eval", "eval.num_evals", "seed", "checkpoint.keep_best",
    "checkpoint.confirm_best", "render.every", "distributed.process_id", "fault.start", "fault.seed",
    "supervise.recovery.attempts", "quick_compile_iterations",
}  # fmt: skip


def test_zero_is_accepted_only_where_it_has_a_meaning():
    for key in of_kind(int):
        if key in ZERO_HAS_A_MEANING:
            load(with_values({key: 0} | ({"fault.site": "reward"} if key == "fault.seed" else {})))
        else:
            assert "greater than 0" in refusal({key: 0})


def test_flags_must_be_true_or_false():
    for key in of_kind(bool):
        for bad in ("yes", "true", 1, 0.0, [True], {}):
            assert "boolean" in refusal({key: bad})
        for good in (True, False):
            needs = {"network.distribution_type": "normal", "fault.site": "physics", "ppo.clipping_epsilon_value": 1.0}
            load(with_values({**needs, "env.source": "playground", key: good}))


def test_text_options_reject_other_types():
    for key, bad in itertools.product(of_kind(str), (3, True, ["a"], {})):
        assert "string" in refusal({key: bad})


ONE_CHOICE = ("ppo.symmetry", "network.recurrent")  # beside null


def test_unknown_choice_lists_the_known_choices():
    for key, bad in itertools.product(of_kind(typing.Literal), ("nonsense", 3, True, [], {})):
        if (key, bad) == ("distributed.enabled", True):
            continue  # YAML's form of a word that is allowed
        message = refusal({key: bad})
        assert "input should be '" in message and (" or '" in message or key in ONE_CHOICE)


def test_lists_and_mappings_reject_other_types():
    for key in of_kind(tuple):
        for bad in (3, "32,32", {"a": 1}, True):
            refusal({key: bad})
        for bad in (True, [1]):
            assert refusal({key: [bad]}, f"{key}.0")
    for key, bad in itertools.product(of_kind(dict), (3, "a: 1", [1])):
        refusal({key: bad})
    for (prefix, _), bad in itertools.product(sections()[1:], (3, "a", [1], None)):
        refusal({prefix[:-1]: bad})
    for data in (None, 3, "env", [], ["env"]):
        with pytest.raises(ConfigError, match=r"^config: input should be a valid dictionary"):
            load(data)


def test_null_is_accepted_only_where_it_has_a_meaning():
    for key, leaf in KEYS.items():
        if leaf.nullable:
            load(with_values({key: None}))
        elif key == "ppo.learning_rate_schedule":
            assert load(with_values({key: None})).ppo.learning_rate_schedule == "constant"
        else:
            refusal({key: None})


def test_unknown_key_gets_a_suggestion_or_a_list_of_all_keys():
    for prefix, section in sections():
        name = list(section.model_fields)[-1]
        assert f"did you mean {name}?" in refusal({f"{prefix}{name}x": 1})
        listed = refusal({f"{prefix}zzzzzzzz": 1})
        assert all(field in listed for field in section.model_fields)


# --- bounds


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("ppo.discounting", (0, 1, 0.5), (-0.1, 1.0001)),
        ("ppo.gae_lambda", (0, 1), (-1, 2)),
        ("ppo.learning_rate_warmup", (0, 0.999), (1, -0.1)),
        ("ppo.optimizer.b1", (0, 0.9), (1, -0.1)),
        ("ppo.optimizer.b2", (0, 0.9), (1, 1.5)),
        ("guards.limiters.log_ratio", (1e-3, 80), (80.1, 0)),
        ("seed", (0, 2**32 - 1), (2**32, -1)),
        ("total_steps", (1, 3e7, 2**32, 10**13, 2**64 - 1), (0, 2**64, 2.5)),
    ],
)
def test_numbers_are_accepted_up_to_the_ends_of_their_range(key, inside, outside):
    for value in inside:
        load(with_values({key: value}))
    for value in outside:
        refusal({key: value})


# --- sizes that must divide each other


def suggested(message: str) -> int:
    """The number that an error message suggests."""
    return int(re.search(r"(\d+) would fit", message)[1])


def mend(data: dict[str, Any], devices: int | None = None) -> Config:
    """Applies suggestions until the configuration loads; each suggestion must cure its error."""
    cured: list[str] = []
    while True:
        try:
            settings = load(data)
            if devices is not None:
                settings.ppo.require_devices(devices)
            return settings
        except ConfigError as error:
            key, message = str(error).split(": ", 1)
            assert "\n" not in str(error)
            assert key not in cured, f"{cured} were mended, then: {error}"
            cured.append(key)
            before = data
            data = with_values({key: suggested(message)}, data)
            assert data != before


SIZES = st.integers(1, 300)
MANY = st.fixed_dictionaries(
    {
        "env.episode_length": st.integers(1, 2000),
        "env.action_repeat": st.integers(1, 12),
        "ppo.num_envs": st.one_of(SIZES, st.integers(1, 10_000)),
        "ppo.batch_size": SIZES,
        "ppo.num_minibatches": st.integers(1, 40),
        "ppo.gradient_accumulation": st.integers(1, 20),
    }
)


@settings(max_examples=100)
@given(MANY, st.integers(1, 12))
@example({"ppo.num_envs": 7, "ppo.batch_size": 4, "ppo.num_minibatches": 2}, 1)
@example({"env.episode_length": 3, "env.action_repeat": 4}, 1)
@example({"ppo.num_envs": 10, "ppo.batch_size": 10, "ppo.num_minibatches": 1}, 4)
@example({"ppo.num_envs": 24, "ppo.batch_size": 24, "ppo.num_minibatches": 1, "ppo.gradient_accumulation": 8}, 6)
def test_suggested_sizes_are_accepted(changes, devices):
    """Each suggestion, applied unchanged, cures the error of its key."""
    mended = mend(mend(with_values(changes)).model_dump(), devices)
    assert load(mended.model_dump(mode="json")) == mended
    for size in (mended.ppo.num_envs, mended.ppo.batch_size):
        assert size % devices == 0
    assert (mended.ppo.batch_size // devices) % mended.ppo.gradient_accumulation == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo.num_envs": 7, "ppo.batch_size": 2**30, "ppo.num_minibatches": 1},
        {"ppo.gradient_accumulation": 7, "ppo.batch_size": 2**30, "ppo.num_minibatches": 1},
        {"ppo.num_envs": 2**31 - 1},
    ],
)
def test_huge_size_is_rejected_without_a_long_search(changes):
    """A search over all smaller sizes would take minutes."""
    with pytest.raises(ConfigError, match="would fit"):
        load(with_values(changes))


# --- contradictions


ADAPTIVE = {"ppo.learning_rate_schedule": "adaptive_kl"}
# The error names the first key.
CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"ppo.batch_size": 2**30, "ppo.num_minibatches": 2},
    {"ppo.desired_kl": 0.02},
    {"ppo.learning_rate_schedule_max_lr": 0.02},
    {"ppo.optimizer.weight_decay": 0.1},
    {"ppo.normalize_until_count": 10},
    {"ppo.learning_rate": 1.0, **ADAPTIVE},
    {"ppo.learning_rate_warmup": 0.1, **ADAPTIVE},
    {"ppo.learning_rate_schedule_min_lr": 1e-2, "ppo.learning_rate_schedule_max_lr": 1e-3, **ADAPTIVE},
    {"network.state_dependent_std": True},
    {"network.mean_kernel_init_kwargs": {"scale": 1}},
    {"guards.limiters.policy_std_min": 1.0, "guards.limiters.policy_std_max": 1.0},
    {"guards.policy.min_std": 9.0},
    {"guards.policy.min_std": 1e-3, "guards.policy.max_std": 1e-4},
    {"env.episode_length": 10**9, "env.action_repeat": 1},
    {"env.training_episode_length": 3, "env.action_repeat": 2},
    {"fault.value": 1.0},
    {"fault.eval": True, "fault.site": "gradient"},
    {"fault.value": "nan", "fault.site": "learning_rate"},
    {"fault.site": "normalizer", "ppo.normalize_observations": False},
    {"precision.loss_scale.initial": 0.5},
    {"env.name": "a.b", "env.source": "import"},
)


@pytest.mark.parametrize("changes", CONTRADICTIONS, ids=lambda changes: next(iter(changes)))
def test_contradictory_options_are_rejected(changes):
    refusal(changes)


# --- the value of a fault


@pytest.mark.parametrize("value", ["nan", "-inf", NAN, INF, -3.5])
def test_fault_value_may_be_any_number_or_its_name(value):
    """Null means the default of the site."""
    found = load(with_values({"fault.site": "reward", "fault.value": value})).fault.number
    assert str(found) == str(float(value))
    assert math.isnan(load(with_values({"fault.site": "reward"})).fault.number)


# --- spelling of Brax


def test_normalizer_update_order_defaults_to_that_of_brax():
    for changes, first in (
        ({}, True),
        ({"ppo.learning_rate_schedule": "ADAPTIVE_KL"}, False),
        ({"ppo.normalizer_update": "after"}, False),
        ({"ppo.learning_rate_schedule": "ADAPTIVE_KL", "ppo.normalizer_update": "before"}, True),
    ):
        assert load(with_values(changes)).ppo.updates_normalizer_first is first


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gamma", "did you mean ppo.discounting?"),
        ("steps", "did you mean total_steps?"),
        ("seed_count", "did you mean seeds?"),
        ("eval.learning_rate", "did you mean ppo.learning_rate?"),
        ("guards.max_share", "did you mean guards.storm.max_share?"),
        ("seed.x", "seed is a value, not a section"),
        (
            "checkpoint.colour",
            "allowed here: enabled, every, every_minutes, keep, keep_best, confirm_best, keep_period, asynchronous",
        ),
    ],
)
def test_unknown_key_suggests_the_key_that_was_meant(key: str, hint: str) -> None:
    assert str(unknown_key(Config, key)) == f"{key}: unknown key; {hint}"
