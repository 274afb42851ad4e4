"""The steps after an iteration of one seed: log, decide, apply the decision, reset and save."""

from __future__ import annotations

import functools

from rlstable.device import hosts
from rlstable.ppo.state import Metrics
from rlstable.runner.decision import Action, Decision, cause_of
from rlstable.runner.result import Row
from rlstable.runner.seed_run import SeedRun
from rlstable.supervise.stop_reasons import StopReason


def finish_iteration(
    run: SeedRun, metrics: Metrics, evaluation: Row, requested_stop: StopReason | None, saves: bool
) -> StopReason | None:
    """Finishes the iteration of one seed: logs, decides, applies the decision and saves.

    Call it after `SeedRun.record_iteration`.

    Args:
        run: The seed.
        metrics: Metrics of the iteration, on the host.
        evaluation: Metrics of the present policy; empty if it was not evaluated.
        requested_stop: Stop reason that a signal or the clock requests.
        saves: Whether to save the state if it is good, whatever the count of iterations.

    Returns:
        The stop reason if the seed ends after this iteration, else None.
    """
    row = run.log.evaluation(evaluation) if evaluation else {}
    cause = cause_of(metrics, run.host, run.config, run.return_check.collapsed)
    if row or run.schedule.finished or cause or requested_stop or run.schedule.logs:
        run.log.row(row)
    decision = run.supervisor.decide(cause, run.schedule.finished)
    match decision.action:
        case Action.ROLL_BACK:
            run.cause = decision.cause
            run.roll_back(decision)
            return None
        case Action.STOP:
            run.cause = decision.cause
            return _stop(run, decision)
        case Action.PASS_OVER:
            run.supervisor.pass_over(decision)
            score = row.get("eval/episode_reward")
        case Action.END_WITH_BEST_POLICY:
            score = run.take_best_policy()
        case Action.CONTINUE:
            score = row.get("eval/episode_reward")
    return _continue(run, metrics, row, score, requested_stop, saves)


def _stop(run: SeedRun, decision: Decision) -> StopReason | None:
    """Applies a decision to stop; returns the stop reason."""
    if decision.program is not None:
        return run.needs_own_program(decision.program)
    if decision.plan is not None:
        run.host.attempts = decision.plan.attempts
    if decision.stop_reason is StopReason.policy_collapsed:
        score = run.take_best_policy()
        run.saving.save(run.state, score)
        run.checkpoints.wait()
    return decision.stop_reason


def _continue(
    run: SeedRun, metrics: Metrics, row: Row, score: float | None, requested_stop: StopReason | None, saves: bool
) -> StopReason | None:
    """Takes a remedy back if that is due, resets, keeps and saves the state.

    Args:
        run: The seed.
        metrics: Metrics of the iteration.
        row: Metrics of the evaluation; empty if there was none.
        score: Return of the state that is saved; None if it was not evaluated.
        requested_stop: Stop reason that a signal or the clock requests.
        saves: Whether to save the state if it is good, whatever the count of iterations.

    Returns:
        The stop reason; None to continue training.
    """
    healthy, host = bool(metrics.healthy), run.host
    learned = healthy and host.iterations_without_update == 0
    # These changes come before saving, because a resumed run continues from the saved state.
    run.state = run.supervisor.watch(run.state, learned, functools.partial(run.keys.between, 2))
    run.reset_if_due()
    run.saving.finish_iteration()
    completed = StopReason.completed if run.schedule.finished else None
    stop_reason = requested_stop or _wants_to_stop(run, row) or completed
    # A state is kept by counts only, never by disk or clock, so a resumed run rolls back to the same state. A single
    # healthy iteration among bad ones shows nothing: the policy may be ruined already.
    good = learned and host.healthy_needed == 0
    if good and (row or run.supervisor.keep_is_due()):
        run.supervisor.keep(run.state)
    if good:
        run.return_check.keep(run.state)
    if healthy and (saves or run.saving.due(host.iteration) or row or stop_reason is not None):
        run.saving.save(run.state, score)
        if hosts.from_writer("gone", lambda: run.config.checkpoint.enabled and run.saving.gone):
            return StopReason.not_saved
    return stop_reason


def _wants_to_stop(run: SeedRun, row: Row) -> StopReason | None:
    """The stop reason if the policy has reached the target return or the callback has returned True, else None."""
    value, target = row.get("eval/episode_reward"), run.config.eval.target_return
    if target is not None and value is not None and value >= target:
        return StopReason.target_reached
    return StopReason.stopped if run.log.stopped_by_callback else None
