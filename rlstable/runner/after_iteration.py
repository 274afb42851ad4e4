"""The steps after an iteration of one seed: record, log, decide, apply the decision, reset and save; and rollbacks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rlstable import faults
from rlstable.config.supervise import RAISE_PRECISION
from rlstable.device import hosts, sharding
from rlstable.device.precision import Level
from rlstable.io.run_folder import forget_result
from rlstable.ppo.state import SPECS, Metrics, Slot, TrainState
from rlstable.runner.decision import Action, Decision, cause_of, decide
from rlstable.runner.host_state import Draw
from rlstable.runner.listener import Row
from rlstable.runner.seed import Seed
from rlstable.supervise import remedies
from rlstable.supervise.diagnosis import CRITIC_BEHIND, FAILURE_REPEATS
from rlstable.supervise.memory import MemoryPlan
from rlstable.supervise.snapshots import Snapshot
from rlstable.supervise.stop_reasons import SAVED, StopReason


def record_iteration(seed: Seed, metrics: Metrics, seconds: float) -> bool:
    """Records an iteration whose result is already in the seed's state; returns whether an evaluation is due.

    The metrics are on the host, and the iteration has taken `seconds`.
    """
    healthy, host = bool(metrics.healthy), seed.host
    evaluates = seed.schedule.evaluates_next and healthy
    if not seed.has_iterated:
        seed.has_iterated = True
        if hosts.is_writer():
            forget_result(seed.run_dir)  # not sooner: a run that cannot start loses nothing
        seed.confirmed = {}
    host.replaced = None
    seed.step_before, host.step = host.step, int(metrics.counters.env_steps)
    seed.saving.record_iteration(healthy)
    host.iteration += 1
    learned = metrics.values["training/accepted_share"] > 0
    host.iterations_without_update = 0 if learned else host.iterations_without_update + 1
    if not healthy:  # a guard without patience may trip in many iterations, so the doubt has a bound
        host.healthy_needed = min(host.healthy_needed + 1, seed.config.supervise.recovery.every)
    elif host.iterations_without_update == 0:
        host.healthy_needed = max(host.healthy_needed - 1, 0)
    bad = any(metrics.trips[name].any() for name in seed.setup.env.guards)
    host.pool_used |= bad or seed.config.env.reset == "pool"
    host.elapsed += seconds
    seed.log.telemetry.add(metrics, seconds)
    seed.return_check.train(metrics)
    seed.log.iteration(metrics)
    if seed.state.incident is not None:
        _record_incident(seed, seed.state.incident, bad)
    return evaluates


def finish_iteration(
    seed: Seed, metrics: Metrics, evaluation: Row, requested_stop: StopReason | None, saves: bool
) -> StopReason | None:
    """Finishes an iteration after `record_iteration`: logs, decides, applies the decision and saves.

    The evaluation is empty if the policy was not evaluated. `saves` asks to save a good state, whatever the count of
    iterations. Returns the stop reason if the seed ends after this iteration, else None.
    """
    row = seed.log.evaluation(evaluation) if evaluation else {}
    update, finished = seed.config.guards.finite_update, seed.schedule.finished
    patience = update.patience if update.enabled else None
    idle = seed.host.iterations_without_update
    cause = cause_of(metrics, idle, patience, finished, seed.return_check.collapsed)
    if row or finished or cause or requested_stop or seed.schedule.logs:
        seed.log.row(row, seed.counts)
    programs = seed.programs
    decision = decide(cause, finished, seed.host, seed.recovery, programs.levels_for, programs.shared)
    seed.cause = decision.cause if decision.action in (Action.ROLL_BACK, Action.STOP) else seed.cause
    score = row.get("eval/episode_reward")
    match decision.action:
        case Action.ROLL_BACK:
            roll_back(seed, decision)
            seed.saving.save_at_once(seed.state)
            return None
        case Action.STOP:
            return _stop(seed, decision)
        case Action.PASS_OVER:
            _pass_over(seed, decision)
        case Action.END_WITH_BEST_POLICY:
            score = _take_best_policy(seed)
    return _continue(seed, metrics, row, score, requested_stop, saves)


def _stop(seed: Seed, decision: Decision) -> StopReason | None:
    """Applies a decision to stop; returns the stop reason."""
    if decision.program is not None:
        return seed.needs_own_program(decision.program)
    if decision.plan is not None:
        seed.host.attempts = decision.plan.attempts
    if decision.stop_reason is StopReason.policy_collapsed:
        score = _take_best_policy(seed)
        seed.saving.save(seed.state, score)
        seed.checkpoints.wait()
    return decision.stop_reason


def _continue(
    seed: Seed, metrics: Metrics, row: Row, score: float | None, requested_stop: StopReason | None, saves: bool
) -> StopReason | None:
    """Takes a remedy back if that is due, resets, keeps and saves the state; returns the stop reason if there is one.

    `row` has the metrics of the evaluation, `score` the return of the state that is saved, if it was evaluated.
    """
    healthy, host = bool(metrics.healthy), seed.host
    learned = healthy and host.iterations_without_update == 0
    # These changes come before saving, because a resumed run continues from the saved state.
    _take_back_remedy(seed, learned)
    _speed_up_critic(seed)
    _reset_if_due(seed)
    seed.saving.finish_iteration()
    completed = StopReason.completed if seed.schedule.finished else None
    stop_reason = requested_stop or _wants_to_stop(seed, row) or completed
    # A state is kept by counts only, never by disk or clock, so a resumed run rolls back to the same state. A single
    # healthy iteration among bad ones shows nothing: the policy may be ruined already.
    good = learned and host.healthy_needed == 0
    if good and (row or seed.schedule.copies or host.logged_iteration % seed.config.checkpoint.every == 0):
        seed.keep_last_good()
    if healthy and host.healthy_needed == 0:  # the best evaluation may follow an iteration without an accepted update
        seed.return_check.keep(seed.state)
    saved = seed.saving.after_iteration(seed.state, score, bool(saves or row or stop_reason is not None))
    return stop_reason if saved else StopReason.not_saved


def _wants_to_stop(seed: Seed, row: Row) -> StopReason | None:
    """The stop reason if the policy has reached the target return or the callback has returned True, else None."""
    value, target = row.get("eval/episode_reward"), seed.config.eval.target_return
    if target is not None and value is not None and value >= target:
        return StopReason.target_reached
    return StopReason.stopped if seed.log.stopped_by_callback else None


def _take_back_remedy(seed: Seed, learned: bool) -> None:
    """Counts an iteration without failure; takes the latest remedy back after a long healthy stretch."""
    level = seed.level
    seed.host.attempts, remedy = seed.recovery.after(seed.host.attempts, learned)
    if remedy is None:
        return
    seed.event("remedy_taken_back", remedy=str(remedy), after=seed.host.attempts.stretch)
    if remedy.name == RAISE_PRECISION:
        _change_level(seed, level, "healthy", seed.keys.between(Draw.CONVERSION))
    else:
        seed.state = sharding.place(remedies.take_back(remedy, seed.state), seed.programs.mesh, SPECS)


def _speed_up_critic(seed: Seed) -> None:
    """Speeds up the critic once in each episode of trouble of the sign `critic_behind`."""
    record = seed.host.signs.records.get(CRITIC_BEHIND)
    if not seed.config.speeds_up_critic or record is None:
        return
    seed.host.attempts, remedy = seed.recovery.speed_up_critic(seed.host.attempts, record.count)
    if remedy is not None:
        seed.event("remedy_applied", remedy=str(remedy), cause=CRITIC_BEHIND)
        state = remedies.apply(remedy, seed.state, seed.setup.ppo.optimizer)
        seed.state = sharding.place(state, seed.programs.mesh, SPECS)


def _reset_if_due(seed: Seed) -> None:
    """Resets the environments and refills the pool of first states, each if it is due."""
    if seed.schedule.resets(seed.step_before):
        seed.state = seed.setup.reset_envs(seed.state, seed.keys.between(Draw.RESET))
    if seed.schedule.refills:
        seed.host.pool_used = False
        seed.state = seed.setup.refill_pool(seed.state, seed.keys.between(Draw.REFILL))


def _take_best_policy(seed: Seed) -> float | None:
    """Replaces a collapsed policy by the best one; returns the best policy's return in fresh episodes."""
    host, check, best = seed.host, seed.return_check, seed.snapshots.best
    seed.state = seed.snapshots.with_best_policy(seed.state)
    host.replaced = {"iteration": best.iteration, "step": best.step, "fallen_return": check.fallen_return}
    host.last_return = check.best_return
    return host.last_return


def final_stop_reason(seed: Seed, stop_reason: StopReason) -> StopReason:
    """The stop reason, or `not_saved` if the state that it promises is not saved.

    If the last states were bad and no earlier state is saved, the run hands over its last good state.
    """
    final = seed.saving.final_stop_reason(stop_reason, seed.state)
    if final is StopReason.not_saved and stop_reason in SAVED and seed.saving.may_hand_over:
        _hand_over_last_good(seed)
        final = seed.saving.final_stop_reason(stop_reason, seed.state)
    return final


def _hand_over_last_good(seed: Seed) -> None:
    """Replaces the bad last state by the last good one, with clean environments, and saves it.

    Counters and random key stay: the steps were trained, and a later resume continues from them.
    """
    host, good, last = seed.host, seed.snapshots.last_good, seed.state
    seed.state = dataclasses.replace(_last_good_state(seed), counters=last.counters, key=last.key)
    host.replaced = {"iteration": good.iteration, "step": good.step}
    host.iterations_without_update, host.healthy_needed, host.pool_used = 0, 0, False
    seed.event("last_good_handed_over", policy_iteration=good.iteration, policy_step=good.step)
    seed.snapshots.candidate.clear()
    seed.keep_last_good()
    seed.saving.save_at_once(seed.state)


def _pass_over(seed: Seed, decision: Decision) -> None:
    """Reports once, as a sign, that the run continues after a failure because a rollback would repeat it."""
    host, cause = seed.host, decision.cause
    assert cause is not None
    if FAILURE_REPEATS in host.signs.records:
        return
    since = host.logged_iteration - host.attempts.recent[-1]["at"]
    text = (
        f"{cause.name} came again {since} iterations after the rollback, where it had come before: the cause is "
        "what the environment shows, so there is no further rollback for it; see what changes in the environment"
    )
    host.signs.log(FAILURE_REPEATS, host.logged_step, text)
    seed.event("sign", sign=FAILURE_REPEATS, text=text, value=float(since))


def _record_incident(seed: Seed, slot: Slot, bad: bool) -> None:
    """Writes the environments captured in this iteration if any went bad, and empties the slots if that is due."""
    host, at, incidents = seed.host, seed.host.logged_iteration, seed.host.incidents
    if bad and seed.incidents.wanted(incidents, at):
        num_envs = seed.state.env_state.done.shape[0]
        captured = jax.device_get(sharding.gathered(slot))

        def write() -> int:
            seed.incidents.write(incidents, captured, host.iteration, at, seed.level._asdict(), num_envs)
            return incidents.count

        incidents.count, incidents.last = hosts.from_writer("incidents", write), at
    if seed.incidents.opens_after(incidents, at):
        empty = sharding.place(np.zeros(slot.taken.shape, bool), seed.programs.mesh, sharding.SPLIT)
        seed.state = dataclasses.replace(seed.state, incident=dataclasses.replace(slot, taken=empty))


def roll_back(seed: Seed, decision: Decision) -> None:
    """Rolls back to a snapshot under the remedy of a decision, with clean environments and new random numbers."""
    plan, host, setup_level = decision.plan, seed.host, seed.level
    assert decision.cause is not None and plan is not None and plan.remedy is not None
    collapse = decision.cause is StopReason.policy_collapsed
    good = seed.snapshots.best if collapse else seed.snapshots.last_good
    host.attempts = plan.attempts
    number = plan.attempts.count
    key = jax.random.fold_in(jax.random.fold_in(seed.keys.rollback, good.iteration), 2**31 + number)
    seed.state = _restored(seed, good)
    _change_level(seed, setup_level, decision.cause.name, key)
    setup = seed.setup
    state = setup.reset_envs_and_pool(seed.state, key)
    if state.fault is not None:
        state = faults.after_rollback(state, host.iteration - good.iteration)
    state = dataclasses.replace(state, key=jax.random.fold_in(state.key, number))
    seed.state = setup.convert_state(remedies.apply(plan.remedy, state, setup.ppo.optimizer))
    seed.event(
        "rolled_back",
        cause=decision.cause.name,
        attempt=number,
        remedy=str(plan.remedy),
        to_iteration=good.iteration,
        lost_steps=host.step - good.step,
    )
    _rewind_host(seed, good)


def roll_back_to_plan(seed: Seed, plan: MemoryPlan) -> None:
    """Rolls back to the last good state with a smaller memory plan; the arrays of the present one may be deleted."""
    seed.host.plan = dataclasses.replace(plan)
    seed.host.attempts.lost_iterations += 1  # the one that failed, so that its number is not used again
    seed.state = _last_good_state(seed)
    _rewind_host(seed, seed.snapshots.last_good)


def _last_good_state(seed: Seed) -> TrainState:
    """The last good state with clean environments, without a remedy; the arrays of the present one may be deleted."""
    good, setup = seed.snapshots.last_good, seed.setup
    key = jax.random.fold_in(seed.keys.between(Draw.PLAN), good.iteration)
    return setup.convert_state(setup.reset_envs_and_pool(good.restored(seed.state, seed.programs.mesh), key))


def _restored(seed: Seed, good: Snapshot) -> TrainState:
    """A snapshot, with the factors of the remedies now in effect: some may have been taken back since then."""
    scales = {name: getattr(seed.state.tuning, name) for name in remedies.SCALES}
    state = good.restored(seed.state, seed.programs.mesh)
    hold = jnp.zeros_like(state.tuning.policy_hold)  # refit_critic holds for one attempt only
    return dataclasses.replace(state, tuning=dataclasses.replace(state.tuning, policy_hold=hold, **scales))


def _change_level(seed: Seed, before: Level, cause: str, key: jax.Array) -> None:
    """Converts the state to the present precision level, if that is another one; the key is for its pool."""
    if seed.level != before:
        seed.event("precision_changed", level=str(seed.level), before=str(before), cause=cause)
        seed.state = seed.programs.converted(seed.host, seed.state, key)


def _rewind_host(seed: Seed, to: Snapshot) -> None:
    """Sets the host's counts back to a snapshot, and adds the difference to the lost steps and iterations.

    `HostState.logged_step`, the sum of trained and lost steps, does not change.
    """
    host = seed.host
    host.attempts.lost_iterations += host.iteration - to.iteration
    host.attempts.lost_steps += host.step - to.step
    host.iteration, host.step = to.iteration, to.step
    host.episodes = int(seed.state.counters.episodes)
    host.iterations_without_update, host.healthy_needed, host.pool_used = 0, 0, False
    seed.snapshots.forget_later(seed.state, to.iteration, to.step)
    seed.keep_last_good()
