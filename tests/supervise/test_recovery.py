"""Recovery: exact sequences of remedies, of taking them back and of giving up, without training."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rlstable.config.schema import ConfigError, validate
from rlstable.config.supervise import RecoveryConfig, Remedy, SuperviseConfig
from rlstable.supervise.recovery import Attempts, Recovery

ORDER = ["fresh_resets", "scale_learning_rate 0.5", "reset_optimizer"]


class RememberingRecovery:
    """Recovery with its attempts, as a run keeps it."""

    def __init__(self, config: RecoveryConfig, attempts: Attempts):
        self.attempts = attempts
        self._recovery = Recovery(config)

    def plan(self, cause: str, at: int, *args: Any) -> Remedy | None:
        before = copy.deepcopy(self.attempts)
        plan = self._recovery.plan(self.attempts, cause, at, at, *args)
        assert self.attempts == before, "a plan changes nothing"
        self.attempts = plan.attempts
        return plan.remedy

    def healthy(self, good: bool) -> Remedy | None:
        before = copy.deepcopy(self.attempts)
        after, remedy = self._recovery.after(self.attempts, good)
        assert self.attempts == before
        self.attempts = after
        return remedy

    def speed_up_critic(self, episodes: int) -> Remedy | None:
        self.attempts, remedy = self._recovery.speed_up_critic(self.attempts, episodes)
        return remedy


def recovery(remembered: Attempts | None = None, **fields: Any) -> RememberingRecovery:
    chosen = {"remedies": ["fresh_resets", {"scale_learning_rate": 0.5}, "reset_optimizer"], "attempts": 4}
    config = validate(RecoveryConfig, chosen | fields)
    return RememberingRecovery(config, Attempts() if remembered is None else remembered)


def remedy_of(remedy: Remedy | None) -> str | None:
    return None if remedy is None else str(remedy)


def test_remedies_come_in_order_again_and_again_until_the_attempts_are_used_up() -> None:
    own = recovery()
    assert [remedy_of(own.plan("storm", at)) for at in range(6)] == [*ORDER, ORDER[0], None, None]
    assert own.attempts.count == 4
    assert [attempt["cause"] for attempt in own.attempts.recent] == ["storm"] * 4
    # Only remedies that can be taken back are active.
    assert own.attempts.applied == [{"scale_learning_rate": 0.5}]


def test_attempts_older_than_the_window_do_not_count() -> None:
    """Four attempts in a hundred iterations: older ones do not count, but their number does not start again."""
    own = recovery(window=100)
    assert all(own.plan("storm", at) for at in (0, 10, 20, 30))
    assert own.plan("storm", 99) is None
    assert own.plan("storm", 100) is not None
    assert own.attempts.count == 5
    assert own.plan("storm", 101) is None


PRECISE = ["fresh_resets", "raise_precision", "reset_optimizer"]


def test_precision_is_raised_first_for_causes_that_it_may_cure_and_lowered_if_no_level_helps() -> None:
    own = recovery(remedies=PRECISE, attempts=10)
    steps = []
    for at in range(4):
        steps.append((remedy_of(own.plan("storm", at, 2)), own.attempts.precision_steps))
    raised = [("raise_precision", 1), ("raise_precision", 2)]
    assert steps == [*raised, ("fresh_resets", 0), ("reset_optimizer", 0)]


def test_precision_is_never_raised_for_other_causes_or_without_the_remedy() -> None:
    own = recovery(remedies=PRECISE, attempts=10)
    assert [remedy_of(own.plan("storm", at)) for at in range(3)] == ["fresh_resets", "reset_optimizer", "fresh_resets"]
    assert remedy_of(recovery().plan("storm", 0, 2)) == "fresh_resets"
    assert recovery(remedies=["raise_precision"]).plan("storm", 0) is None


def test_raised_precision_is_lowered_after_a_healthy_stretch_and_raised_again_if_that_was_too_early() -> None:
    own = recovery(remedies=PRECISE, relax_after=2, attempts=10)
    own.plan("storm", 0, 1)
    assert [remedy_of(own.healthy(True)) for _ in range(2)] == [None, "raise_precision"]
    assert own.attempts.precision_steps == 0
    assert remedy_of(own.plan("storm", 3, 1)) == "raise_precision"
    assert [own.healthy(True) for _ in range(3)] == [None] * 3
    assert remedy_of(own.healthy(True)) == "raise_precision"


def test_remedies_are_taken_back_one_by_one_and_the_latest_first() -> None:
    own = recovery(relax_after=3, remedies=[{"scale_learning_rate": 0.5}, {"tighten_clipping": 0.25}])
    own.plan("storm", 0)
    own.plan("storm", 1)
    taken = [own.healthy(True) for _ in range(9)]
    assert [None if remedy is None else str(remedy) for remedy in taken] == [
        None, None, "tighten_clipping 0.25", None, None, "scale_learning_rate 0.5", None, None, None,
    ]  # fmt: skip
    assert own.attempts.applied == []
    # After healthy iterations the list starts again.
    assert remedy_of(own.plan("storm", 50)) == "scale_learning_rate 0.5"


def test_remedy_taken_back_too_early_comes_first_and_stays_longer() -> None:
    """Flapping: a remedy that is needed all the time is taken back after 2, 4, 8, ... iterations."""
    own = recovery(relax_after=2, attempts=100, remedies=[{"scale_learning_rate": 0.5}, "fresh_resets"])
    stretches, at = [], 0
    remedies = [remedy_of(own.plan("policy", at))]
    for _ in range(4):
        length = 0
        while True:
            at, length = at + 1, length + 1
            if own.healthy(True) is not None:
                break
        stretches.append(length)
        remedies.append(remedy_of(own.plan("policy", at)))
    assert remedies == ["scale_learning_rate 0.5"] * 5
    assert stretches == [2, 4, 8, 16]
    assert own.attempts.applied == [{"scale_learning_rate": 0.5}]


def test_lagging_critic_gets_its_remedy_once_per_episode_and_none_while_it_is_in_effect() -> None:
    own = recovery(relax_after=3, lagging_critic_rate=10.0)
    assert [remedy_of(own.speed_up_critic(episodes)) for episodes in (0, 1, 1, 2)] == [
        None, "scale_critic_rate 10", None, None,
    ]  # fmt: skip
    assert [remedy_of(own.healthy(True)) for _ in range(3)] == [None, None, "scale_critic_rate 10"]
    assert own.speed_up_critic(2) is None  # taken back, and it did not help
    assert remedy_of(own.speed_up_critic(3)) == "scale_critic_rate 10"
    assert (own.attempts.stretch, own.attempts.count, own.attempts.recent) == (6, 0, [])
    assert recovery(lagging_critic_rate=None).speed_up_critic(1) is None


@pytest.mark.parametrize(
    ("remedies", "message"),
    [
        (["pray"], "remedies"),
        ([], "supervise.recovery.remedies: is empty and needs at least one remedy; add one"),
        ([{"scale_learning_rate": 2.0}], "scale_learning_rate needs a factor between 0 and 1"),
        ([{"fresh_resets": 0.5}], "fresh_resets takes no number; write the name alone"),
        ([{"scale_critic_rate": 0.5}], "scale_critic_rate needs a factor above 1, at most 100"),
        ([{"refit_critic": 2.5}], "refit_critic needs a number of iterations"),
        ([{"scale_learning_rate": 0.5, "tighten_clipping": 0.5}], "remedies"),
    ],
)
def test_invalid_remedy_is_a_one_line_error(remedies: list[Any], message: str) -> None:
    class Whole(SuperviseConfig):
        """For the whole path of the key."""

    with pytest.raises(ConfigError) as error:
        validate(Whole, {"recovery": {"remedies": remedies}})
    text = str(error.value)
    assert "\n" not in text and text.startswith("recovery.remedies")
    assert message.removeprefix("supervise.") in text


def test_remedy_is_saved_as_written() -> None:
    written = ["fresh_resets", {"scale_learning_rate": 0.5}]
    config = validate(RecoveryConfig, {"remedies": written})
    assert config.model_dump(mode="json")["remedies"] == written
    assert validate(RecoveryConfig, config.model_dump(mode="json")) == config
    # A name alone has the default factor.
    assert Remedy.model_validate("tighten_clipping").factor == 0.5
    assert Remedy.model_validate("scale_critic_rate").factor == 3.0
    assert Remedy.model_validate("refit_critic").factor == 10.0


PATIENCE = 5


def repeats(failures: list[tuple[int, int]], cause: str = "policy_diverged") -> bool:
    """Whether the last of the failures, each `(at, iteration)`, would be passed over; the others were rolled back."""
    own = Recovery(validate(RecoveryConfig, {}), {"policy_diverged": PATIENCE})
    attempts = Attempts()
    for at, iteration in failures[:-1]:
        attempts = own.plan(attempts, "policy_diverged", at, iteration).attempts
    return own.repeats(attempts, cause, *failures[-1])


@pytest.mark.parametrize(
    ("failures", "repeated"),
    [
        ([(30, 30)], False),  # the first failure
        ([(30, 30), (60, 50)], True),  # 30 iterations after each reset of the environments
        ([(30, 30), (60 + PATIENCE, 55)], True),  # the guard is still out of patience
        ([(30, 30), (61 + PATIENCE, 56)], False),
        ([(30, 30), (59, 49)], False),  # sooner: the remedy made it worse
        ([(100, 100), (140, 100)], True),  # at the same iteration of training
        ([(30, 30), (40, 30)], False),
        ([(30, 30), (41, 30)], True),
    ],
)
def test_failure_at_the_same_place_is_not_rolled_back_again(failures: list[tuple[int, int]], repeated: bool) -> None:
    assert repeats(failures) is repeated


def test_only_failures_with_finite_states_are_passed_over() -> None:
    assert not repeats([(30, 30), (60, 50)], "state_not_finite")
    assert not repeats([(30, 30), (60, 50)], "value_loss_exploded")  # another cause than before
