"""Retrains from the checkpoint before an incident up to the incident, in a separate folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import Config, ConfigError
from rlstable.config.run import LoggingConfig
from rlstable.config.schema import validate
from rlstable.io.arrays import describe
from rlstable.io.manifest import Damaged
from rlstable.io.run_folder import steps_in
from rlstable.io.store import open_manager, read_arrays, read_json
from rlstable.replay.recorder import recording
from rlstable.runner.host_state import HostState
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.setup_cache import Factories
from rlstable.supervise.incident import Incident
from rlstable.supervise.stop_reasons import StopReason

Notify = Callable[[str], None]


class Position(NamedTuple):
    """A position in a run. After a rollback the run repeats iterations, so that both fields count.

    Attributes:
        iteration: Iterations done, without rolled back iterations.
        lost: Rolled back iterations.
    """

    iteration: int
    lost: int

    @property
    def at(self) -> int:
        """Iterations done in total, which never decrease."""
        return self.iteration + self.lost


class Rerun(NamedTuple):
    """Recorded steps of a rerun.

    Attributes:
        steps: Arrays by path, `[steps, ...]`, the bad step last.
        start: Position at which the rerun began; iteration 0 is the seed.
        restarted: Whether the recording restarted, because another precision changed the physics arrays.
    """

    steps: dict[str, np.ndarray]
    start: Position
    restarted: bool = False


class _IncidentReached(Exception):
    """The rerun has reached the incident's iteration."""


def run_again(incident: Incident, count: int, notify: Notify) -> Rerun:
    """Retrains up to the incident's iteration and records its environment; the run's folder is only read.

    Args:
        incident: The incident.
        count: Number of steps before the bad step.
        notify: Called with messages about long operations and about problems that do not stop the rerun.

    Raises:
        ConfigError: The run's folder is missing, or the rerun does not reach the incident.
    """
    run_dir, facts = _run_of(incident), incident.facts
    bad = Position(facts["iteration"], facts["lost_iterations"])
    per_iteration, step = _steps_of_an_iteration(incident)
    start = rerun_start(run_dir, bad.at, -(-max(count - step, 0) // per_iteration), notify)
    lost = f" and {bad.lost - start.lost} rolled back iterations" if bad.lost > start.lost else ""
    notify(f"compiling, then training iterations {start.iteration + 1} to {bad.iteration}{lost} again")
    # The whole last iteration is recorded; the host cuts off the steps after the bad step.
    length = per_iteration + max(count - step, 0)
    watched = facts["environment"] - facts["device"] * (facts["num_envs"] // facts["devices"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if start.at:
            _copy(run_dir, folder, start.iteration)
        try:
            recorded = _train(_config(incident, start, bad), folder, bad, recording(watched, length))
        except ConfigError as error:
            raise ConfigError(str(error).replace(name, str(run_dir))) from error
    after = per_iteration - step - 1
    steps = {path: x[: len(x) - after][-count - 1 :] for path, x in _by_path(recorded.last(facts["device"])).items()}
    return Rerun(steps, start, restarted=int(recorded.written[facts["device"]]) < (bad.at - start.at) * per_iteration)


def _run_of(incident: Incident) -> Path:
    folder = incident.folder.absolute()
    run_dir = folder.parent.parent
    if folder.parent.name != "incidents" or not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"{incident.folder}: the incident is not in a run folder, whose checkpoints the history needs; "
            "give runs/.../incidents/<name>"
        )
    if "lost_iterations" not in incident.facts:
        raise ConfigError(
            f"{incident.folder}: an old version of rlstable wrote this incident without its position in the run; "
            "only incidents of newer runs can have a history"
        )
    return run_dir


def _steps_of_an_iteration(incident: Incident) -> tuple[int, int]:
    """Returns the steps of an environment in an iteration, and the steps before the bad step."""
    facts, ppo, repeat = incident.facts, incident.config.ppo, incident.config.env.action_repeat
    per_unroll = ppo.unroll_length * repeat
    step = facts["unroll"] * per_unroll + facts["step"] * repeat + facts["repeat"]
    return ppo.rows // facts["num_envs"] * per_unroll, step


def rerun_start(run_dir: Path, before: int, reach: int, notify: Notify) -> Position:
    """Returns the start of a rerun: the newest checkpoint before all wanted steps.

    Without such a checkpoint the rerun starts at the beginning of the run if it is near, or else at the oldest
    checkpoint before the incident, because retraining a whole run for a few more steps would take too long.

    Args:
        run_dir: The run's folder.
        before: The incident's iteration, with rolled back iterations.
        reach: Number of wanted iterations before the incident.
        notify: Called with messages about damaged checkpoints.
    """
    directory, oldest = run_dir / "checkpoints", Position(0, 0)
    steps = [step for step in steps_in(directory) if step < before]
    if not steps:
        return oldest
    manager = open_manager(directory, None)
    try:
        for step in reversed(steps):
            try:
                host, manifest = read_json(manager, directory, step)
                position = Position(step, HostState.of(host["host"]).attempts.lost_iterations)
                if position.at >= before:
                    continue
                read_arrays(manager, step, "state", manifest.state)  # to check their checksums
                oldest = position
            except Damaged as error:
                notify(f"checkpoint {step} is damaged ({error}); the rerun starts earlier")
                continue
            if position.at < before - reach:
                return position
    finally:
        manager.close()
    return Position(0, 0) if before <= 2 * reach else oldest


def _copy(run_dir: Path, folder: Path, iteration: int) -> None:
    """A copy of a checkpoint, to resume from: a resumed run deletes other checkpoints."""
    source = Path("checkpoints") / str(iteration)
    try:
        shutil.copytree(run_dir / source, folder / source)
    except OSError as error:
        raise ConfigError(
            f"{run_dir / source}: cannot be copied to {folder} ({type(error).__name__}); "
            "make room there, or try again if the run is under way and has just retired it"
        ) from error


def _config(incident: Incident, start: Position, bad: Position) -> Config:
    """The run's configuration without what costs time, leaves files, or ends a run by the clock."""
    config = incident.config
    # What an evaluation does to training: Brax's resets are counted in them, and its state is one to go back to.
    matters = config.ppo.num_resets_per_eval > 0 or start.lost != bad.lost
    changed: dict[str, Any] = {
        "devices": incident.facts["devices"],
        "resume": "auto" if start.at else None,
        "checkpoint": config.checkpoint.model_copy(update={"enabled": False}),
        "logging": validate(LoggingConfig, {"console": "off"}),
        "eval": config.eval.model_copy(
            update={"target_return": None, "num_evals": config.eval.num_evals if matters else 0}
        ),
        "supervise": config.supervise.model_copy(update={"max_wall_time": None}),
    }
    return config.model_copy(update=changed)


def _train(config: Config, folder: Path, bad: Position, factories: Factories) -> Any:
    """Trains until the incident's iteration is done, and returns the recording on the host."""
    loop: TrainingLoop

    def stop_at_incident(_step: int, _row: Any) -> None:
        host = loop.single.host
        if Position(host.iteration, host.attempts.lost_iterations).at >= bad.at:
            raise _IncidentReached  # before the loop evaluates or saves: this iteration may have been the run's last

    loop = TrainingLoop(config, folder, stop_at_incident, factories=factories)
    try:
        stop_reason = loop.run().stop_reason
    except _IncidentReached:
        return jax.device_get(loop.single.state.incident)
    if stop_reason is StopReason.interrupted:
        raise KeyboardInterrupt
    raise ConfigError(
        f"{folder}: the rerun ended after {loop.single.host.iteration} iterations "
        f"({stop_reason.name}: {stop_reason.meaning}), before the incident's iteration {bad.iteration}, so that it "
        "differs from the run; the history needs the machine, the versions and the code of the run"
    )


def _by_path(steps: Any) -> dict[str, np.ndarray]:
    return {describe(path, x).path: x for path, x in jax.tree_util.tree_flatten_with_path(steps)[0]}
