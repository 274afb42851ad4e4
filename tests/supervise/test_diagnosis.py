"""Signs of trouble, warnings and advice: exact sentences, and silence where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from toys import tiny_config

from rlstable.config import Config
from rlstable.supervise.diagnosis import Signs, advice, recovered_text, signs_of, warnings_of
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.stop_reasons import StopReason
from rlstable.supervise.tally import SignState, Tally

NORMALIZE = "set ppo.normalize_values=true ppo.normalize_advantage=true"
# As a hopper logs them while it learns well.
HEALTHY = {
    "training/explained_variance": 0.8, "training/v_loss": 8.0, "training/reward_mean": 2.9,
    "training/reward_greatest": 0.4, "training/policy_distance": 0.02, "training/step_scale": 1.0,
    "limiters/gradient_norm/active": 1.0, "limiters/log_ratio/active": 0.004, "limiters/kl/active": 0.0,
}  # fmt: skip


class Watched:
    """Signs of a configuration, with what they said as pairs of iteration and event."""

    def __init__(self, state: SignState | None = None, **sections: Any):
        self.state = SignState() if state is None else state
        self.said: list[tuple[int, dict[str, Any]]] = []
        self.recovered: list[tuple[int, str]] = []
        self.iteration = 0
        own = config(**sections)
        self._signs = Signs(signs_of(own), own.ppo, own.env, own.eval.num_envs, self._event)

    def _event(self, kind: str, **fields: Any) -> None:
        if kind == "sign":
            self.said.append((self.iteration, fields))
        else:
            assert kind == "sign_recovered"
            self.recovered.append((self.iteration, fields["sign"]))

    def look(self, times: int = 1, **metrics: float) -> None:
        for _ in range(times):
            self.iteration += 1
            self._signs.record_iteration(self.state, self.iteration, 100 * self.iteration, HEALTHY | metrics)

    def active(self, name: str, value: float, times: int = 1) -> None:
        self.look(times, **{f"limiters/{name}/active": value})

    def learn(self, *returns: float, length: float = 100.0) -> None:
        for value in returns:
            self.look(20, **{"episode/sum_reward": value, "episode/length": length})

    def evaluate(self, *returns: float, deviation: float = 0.0, length: float = 100.0) -> None:
        for value in returns:
            worth = {"eval/episode_reward": value, "eval/episode_reward_std": deviation}
            worth["eval/avg_episode_length"] = length
            self.iteration += 1
            self._signs.record_evaluation(self.state, 100 * self.iteration, worth)

    @property
    def names(self) -> list[str]:
        return [fields["sign"] for _, fields in self.said]


def config(**sections: Any) -> Config:
    ppo = {"discounting": 0.99, "reward_scaling": 0.1, "max_grad_norm": 0.5, "learning_rate": 5e-4, "gae_lambda": 0.95}
    ppo |= {"normalize_advantage": True} | sections.pop("ppo", {})
    base = tiny_config(**{"guards": {}} | sections)
    env = base.env.model_copy(update={"episode_length": 1000})
    return base.model_copy(update={"ppo": base.ppo.model_copy(update=ppo), "env": env})


def test_healthy_rows_say_nothing() -> None:
    own = Watched()
    own.look(500)
    own.evaluate(20.0, 900.0, 400.0, 2200.0, 3000.0, 2950.0, 2900.0, 3100.0)
    assert own.said == []
    assert own.state.records == {}


LAGGING = {"training/explained_variance": -1.0, "training/v_loss": 25.0, "training/reward_mean": 5.0}
RAW = {"normalize_advantage": False, "reward_scaling": 10.0}
LARGE = {"training/reward_mean": 0.3, "training/reward_greatest": 10.0}
TINY = {"training/explained_variance": 0.5, "training/v_loss": 0.0}
TINY |= {"training/reward_mean": 1e-4, "training/reward_greatest": 1e-5}
# One of 8,192 samples in every second iteration, as a humanoid that gains from physics that explodes.
MASKED = {"training/valid_share": 1.0 - 2.0**-13}


CALM = {"training/valid_share": 1.0, "training/action_size": 1.0, "training/reward_mean": 0.01}
CALM |= {"limiters/update_norm/active": 0.0, "limiters/reward_outlier/active": 0.0}


def looks(*rows: tuple[int, dict[str, float]]) -> Callable[[Watched], None]:
    """Each row of metrics as often as its number says."""
    return lambda own: [own.look(times, **metrics) for times, metrics in rows] and None


# Settings of PPO; what says nothing; what says the sign then, and no sooner; the sign; start of its text; its value.
SIGNS: dict[str, tuple[dict[str, Any], Callable[[Watched], None], Callable[[Watched], None], str, str, float]] = {
    "saturated limiter": (
        {}, lambda own: own.active("update_norm", 0.62, times=49), lambda own: own.active("update_norm", 0.62),
        "limiter_saturated/update_norm",
        "the limiter update_norm was active 62% of the time for 50 iterations: it takes part in learning; lower ", 0.62,
    ),
    "samples that guards mask": (
        {}, looks(*[(1, {"training/valid_share": 1.0 - 2.0**-24}), (1, MASKED)] * 24, (1, {})), looks((1, MASKED)),
        "samples_masked",
        "guards masked 0.00012 of the samples in 25 of the last 50 iterations: the policy may gain from what comes ",
        2.0**-13,
    ),
    "rare rewards that are clipped": (
        {}, looks((25, {"limiters/reward_outlier/active": 0.0}), (24, {"limiters/reward_outlier/active": 0.002})),
        lambda own: own.active("reward_outlier", 0.002),
        "rewards_outlying", "0.002 of the rewards in 25 of the last 50 iterations were far larger than ", 0.002,
    ),
    "actions far beyond their range": (
        {}, looks((100, {"training/action_size": 9.9}), (24, {"training/action_size": 40.0})),
        looks((1, {"training/action_size": 40.0})),
        "actions_unbounded", "actions were 40 on average in 25 of the last 50 iterations, far beyond ", 40.0,
    ),
    "critic that lags in more than half of the iterations": (
        {}, looks(*[(1, {}), (1, LAGGING)] * 30, (9, LAGGING)), looks((1, LAGGING)), "critic_behind",
        "the explained variance was below 0 in 30 of the last 50 iterations (mean -1), with value errors of 20% of the "
        f"targets: the value network lags behind; {NORMALIZE}; if they are on, lower ", -1.0,
    ),
    "large value targets": (
        RAW, looks((19, LARGE)), looks((1, LARGE)), "reward_scale",
        "value targets were of about 300 in 20 of the last 50 iterations, far from 1; "
        f"{NORMALIZE}, or ppo.reward_scaling=0.3", 300.0,
    ),
    "tiny value targets": (
        {}, looks((19, TINY)), looks((1, TINY)), "reward_scale",
        "value targets were of about 0.001 in 20 of the last 50 iterations, far from 1; "
        f"{NORMALIZE}, or ppo.reward_scaling=1e+03", 0.001,
    ),
    "evaluations far below training": (
        {}, lambda own: own.learn(20.0, 60.0, 80.0) or own.evaluate(0.0), lambda own: own.evaluate(0.5),
        "evaluation_below_training",
        "evaluations of the mean action returned 0.2, where training with sampled actions returned 77.0: the ", 0.25,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ppo", "before", "then", "sign", "text", "value"), SIGNS.values(), ids=SIGNS)
def test_sign_of_trouble_is_said_once_in_time_with_its_numbers_and_recovers(
    ppo: dict[str, Any], before: Any, then: Any, sign: str, text: str, value: float
) -> None:
    own = Watched(ppo=ppo)
    before(own)
    assert own.said == []
    then(own)
    ((at, said),) = own.said
    assert (at, said["sign"], said["value"]) == (own.iteration, sign, pytest.approx(value))
    assert said["text"].startswith(text)
    own.look(200, **CALM)
    own.evaluate(78.0, 79.0)
    assert [name for _, name in own.recovered] == [sign]


@pytest.mark.parametrize("better", ["normalize_values", "normalize_advantage"])
def test_large_value_targets_say_nothing_where_they_are_normalised(better: str) -> None:
    own = Watched(ppo=RAW | {better: True})
    own.look(60, **LARGE)
    assert own.said == []


def test_sparse_rewards_say_nothing() -> None:
    own = Watched()
    own.look(100, **TINY | {"training/reward_mean": 0.0, "training/reward_greatest": 0.0})
    own.look(100, **TINY | {"training/reward_mean": 1e-5, "training/reward_greatest": 0.1})
    assert own.said == []


@pytest.mark.parametrize(
    ("clip", "limit", "said"), [(0.5, 100.0, False), (None, 100.0, True), (None, None, False), (2.0, 1.0, True)]
)
def test_gradient_clipping_is_a_sign_only_where_the_limiter_clips(
    clip: float | None, limit: float | None, said: bool
) -> None:
    own = Watched(guards={"limiters": {"gradient_norm": limit}}, ppo={"max_grad_norm": clip})
    own.active("gradient_norm", 0.6, times=50)
    assert own.names == ["limiter_saturated/gradient_norm"] * said


def test_fallen_return_is_said_after_two_evaluations() -> None:
    own = Watched()
    own.evaluate(100.0, 3000.0, 3000.0, 1000.0)
    assert own.said == []
    own.evaluate(1200.0)
    assert own.said[0][1] == {
        "sign": "return_below_best",
        "text": "the last two evaluations returned 1,100.0 on average, where two in a row had reached 3,000.0; "
        f"lower ppo.learning_rate, or {NORMALIZE}",
        "value": 1100.0,
    }
    own.evaluate(1000.0, 3000.0, 1000.0, 1000.0)
    assert len(own.said) == 1  # one good evaluation does not end the episode
    own.evaluate(3000.0, 3000.0, 1000.0, 1000.0)
    assert own.names == ["return_below_best"] * 2


def test_sign_that_is_over_has_the_step_at_which_it_recovered() -> None:
    own = Watched()
    own.active("log_ratio", 0.5, times=60)
    said = own.state.logged["limiter_saturated/log_ratio"]
    assert (said["lasts"], said["recovered_step"], recovered_text(said, ", ")) == (True, 0, "")
    own.look(200)
    said = own.state.logged["limiter_saturated/log_ratio"]
    assert (said["lasts"], said["recovered_step"]) == (False, 11000)
    assert recovered_text(said, ", ") == ", recovered at step 11,000"
    assert own.recovered == [(110, "limiter_saturated/log_ratio")]
    own.active("log_ratio", 0.5, times=50)
    assert own.state.logged["limiter_saturated/log_ratio"]["recovered_step"] == 0


def test_fallen_return_that_rises_again_says_nothing() -> None:
    own = Watched()
    own.evaluate(100.0, 3000.0, 3000.0, 1000.0, 1500.0, 2000.0)
    assert own.said == []
    own.evaluate(1900.0, 1900.0)
    assert own.names == ["return_below_best"]
    own.evaluate(2950.0, 2950.0)
    assert own.recovered == [(10, "return_below_best")] and len(own.said) == 1


def test_episodes_that_end_sooner_with_a_negative_return_are_said_to_escape_a_cost() -> None:
    own = Watched()
    own.learn(-30.0, length=150.0)
    own.learn(-28.0, length=21.0)
    own.evaluate(-27.0, -27.0, length=90.0)
    own.evaluate(27.0, 27.0, length=21.0)
    assert "episodes_shorten" not in own.names
    own.evaluate(-28.0, -27.5, length=21.0)
    (text,) = [said["text"] for _, said in own.said if said["sign"] == "episodes_shorten"]
    assert text.startswith(
        "episodes end after 21 steps with a return of -27.5; training episodes had 150: unless their end is the goal, "
        "the policy ends episodes to escape a cost; reward each step"
    )


@pytest.mark.parametrize(
    ("returns", "evaluations", "sections", "length"),
    [
        ((-900.0, -200.0), (-300.0, -350.0), {}, 100.0),
        ((20.0,), (0.0, 0.0), {"eval": {"deterministic": False}}, 100.0),
        ((20.0, 80.0), (0.0, 0.0), {"eval": {"env_kwargs": {"bound": 1.0}}}, 100.0),
        ((-20.0, -10.0), (-100.0, -100.0), {}, 1000.0),  # only short training episodes have ended
        ((0.0, 0.05, 0.0, 0.05, 0.0), (0.0, 0.0), {}, 100.0),  # a sparse reward
    ],
)
def test_comparable_evaluations_near_training_say_nothing(
    returns: Any, evaluations: Any, sections: Any, length: float
) -> None:
    own = Watched(**sections)
    own.learn(*returns)
    own.evaluate(*evaluations, length=length)
    assert "evaluation_below_training" not in own.names


def test_lucky_evaluation_is_no_best_return() -> None:
    own = Watched()
    own.evaluate(5.0, 90.0, 6.0, 5.0, 7.0)
    assert own.said == []


def test_fall_within_the_noise_of_evaluations_is_none() -> None:
    own = Watched(eval={"num_evals": 4, "num_envs": 4})
    own.evaluate(0.0, 100.0, 100.0, 70.0, 70.0, deviation=40.0)
    assert own.said == []
    own.evaluate(20.0, 20.0, deviation=40.0)
    assert own.names == ["return_below_best"]


@pytest.mark.parametrize(("recovery", "names"), [(False, []), (True, ["critic_behind"])])
def test_key_off_says_only_the_sign_that_has_a_remedy(recovery: bool, names: list[str]) -> None:
    recover: Any = {"guards": {}, "supervise": {"recovery": {"enabled": recovery}}}
    own = Watched(logging={"console": "off", "signs": False}, **recover)
    own.look(100, **LAGGING, **{"limiters/log_ratio/active": 1.0})
    own.evaluate(0.0, 100.0, 100.0, 0.0, 0.0)
    assert own.names == names and (own.state == SignState()) is not recovery


NAN = float("nan")


def tally(*iterations: dict[str, Any], returns: tuple[float | None, ...] = ()) -> Tally:
    """Counts of iterations of 100 transitions and 4 minibatches; what an iteration does not say is healthy."""
    own = Tally()
    for iteration in iterations:
        trips = iteration.pop("trips", {})
        healthy = {"training/accepted_share": 1.0, "episode/length": 9.0, "episode/sum_reward": 3.0}
        own.count(healthy | iteration, trips, 100, 4, ("finite_update", "spike"), own.transitions + 100)
    for value in returns:
        own.count_evaluation(value)
    return own


def valid(share: float, **trips: dict[str, int]) -> dict[str, Any]:
    return {"training/valid_share": share, "trips": trips}


def names(own: Tally) -> list[str]:
    return list(warnings_of(own))


def test_most_transitions_rejected_is_said_with_counts_and_guards() -> None:
    bad = [valid(0.1, finite_samples={"reward": 88, "value": 2}, storm={"environments": 1}) for _ in range(3)]
    assert warnings_of(tally({}, *bad)).popitem() == (
        "transitions_rejected",
        "guards rejected 270 of 400 transitions, and 68 % of them in the last 4 iterations; most trips: "
        "guards/finite_samples (270, most for reward), guards/storm (3, most for environments)",
    )


def test_rejections_at_the_end_of_a_long_good_run_are_said() -> None:
    good, bad = [{} for _ in range(100)], [valid(0.0, quarantine={"physics": 100}) for _ in range(11)]
    assert names(tally(*good, *bad)) == ["transitions_rejected"]
    assert names(tally(*good, *bad[:10])) == []  # half of the last 20 iterations
    assert names(tally(*good, *bad, *good)) == []  # over, and most of the run was good


def test_loss_that_stays_not_finite_is_said_with_its_step_and_the_returns_beside_it_do_not_count() -> None:
    ruined = {"training/v_loss": NAN, "episode/sum_reward": 1000.0}
    ((name, text),) = warnings_of(tally({"training/v_loss": 1.0}, ruined, dict(ruined))).items()
    assert name == "loss_not_finite" and text.startswith("no finite loss since step 100, so ")
    assert names(tally(dict(ruined), {"training/v_loss": 1.0})) == []
    assert tally(dict(ruined)).finite == 0
    # A state guard has rejected the iteration, so the state before it is kept.
    rejected = Tally()
    values = {"training/accepted_share": 1.0, "training/v_loss": NAN}
    rejected.count(values, {}, 100, 4, (), 100, kept=False)
    assert "loss_not_finite" not in names(rejected)
    # Without an accepted update there is no loss, and the networks are as before.
    assert names(tally({"training/v_loss": NAN, "training/accepted_share": 0.0})) == []


@pytest.mark.parametrize("returns", [(), (None,)])
def test_run_without_any_finite_return_is_said(returns: tuple[None, ...]) -> None:
    bad = {"episode/sum_reward": NAN}
    assert names(tally(bad, returns=returns)) == ["evaluations_void"] * len(returns) + ["no_finite_return"]
    assert "no_finite_return" not in names(tally(bad, {}, returns=returns))
    assert "no_finite_return" not in names(tally(bad, returns=(*returns, 1.0)))


def test_minibatches_are_counted_by_what_rejected_them_if_no_update_was_accepted() -> None:
    none = {"training/accepted_share": 0.0}
    own = tally(
        {"limiters/kl/active": 0.5},
        none | {"limiters/kl/active": 0.75, "trips": {"finite_update": {"gradient": 1}}},
        none | {"limiters/kl/active": 1.0},
        none | {"limiters/kl/active": 0.0} | valid(0.0, quarantine={"reward": 100}),
    )
    assert own.lost == {"finite_update": 1.0, "limiters/kl": 7.0, "no valid sample": 4.0}
    assert own.limiters == {"limiters/kl": [2.25, 4]}


IDLE = {"training/accepted_share": 0.0}


def idle_tally(values: dict[str, Any], trips: dict[str, dict[str, int]] | None = None, times: int = 1) -> Tally:
    own = Tally()
    for _ in range(times):
        own.count(IDLE | values, trips or {}, 100, 4, ("finite_update", "spike"), own.transitions + 100)
    return own


def advise(cause: StopReason, own: Tally) -> str:
    return advice(cause, Attempts(), {}, own)


def test_advice_names_the_limiter_that_rejected_every_update() -> None:
    own = idle_tally({"limiters/kl/active": 1.0}, times=3)
    assert advise(StopReason.no_update_accepted, own) == (
        "no update was accepted for guards.finite_update.patience iterations in a row, or in the whole run. "
        "Updates were rejected by limiters/kl (100%). Every update moved the policy further than guards.limiters.kl "
        "allows: divide ppo.learning_rate by 100 or more."
    )
