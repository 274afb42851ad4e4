"""Reruns the steps to an incident: trains again from the checkpoint before it, in a separate folder."""

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

Tell = Callable[[str], None]


class Place(NamedTuple):
    """A moment of a run: both count, since after a rollback the run comes by the same iteration again.

    Attributes:
        iteration: Iterations done, without those that were given up.
        lost: Those that were.
    """

    iteration: int
    lost: int

    @property
    def at(self) -> int:
        """Iterations done in all; it never runs backwards."""
        return self.iteration + self.lost


class Rerun(NamedTuple):
    """Recorded steps of a rerun.

    Attributes:
        steps: Arrays by path, `[steps, ...]`, the bad step last.
        start: Where it began; at iteration 0 from the seed.
        restarted: Whether recording was restarted, as it is when another precision changes the arrays of the physics.
    """

    steps: dict[str, np.ndarray]
    start: Place
    restarted: bool = False


class _ThereAgain(Exception):
    """The iteration of the incident has been run again."""


def run_again(incident: Incident, count: int, tell: Tell) -> Rerun:
    """Trains again up to the incident's iteration, and records its environment.

    The run's folder is only read.

    Args:
        incident: Which.
        count: Steps before the bad one that are wanted.
        tell: Called with what takes long, and with what is wrong on the way and can be made do with.

    Raises:
        ConfigError: The run's folder is not there, or training again does not come to the incident.
    """
    run_dir, facts = _run_of(incident), incident.facts
    bad = Place(facts["iteration"], facts["lost_iterations"])
    per_iteration, step = _steps_of_an_iteration(incident)
    start = starting_place(run_dir, bad.at, -(-max(count - step, 0) // per_iteration), tell)
    lost = f" and {bad.lost - start.lost} that were given up" if bad.lost > start.lost else ""
    tell(f"training iterations {start.iteration + 1} to {bad.iteration}{lost} again, after what has to be compiled")
    # Of the last iteration everything is recorded, and cut on the host.
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
            f"{incident.folder}: has not its run's folder around it, of whose checkpoints the history is made; "
            "give runs/.../incidents/<name>"
        )
    if "lost_iterations" not in incident.facts:
        raise ConfigError(
            f"{incident.folder}: was written by an rlstable that did not note where in the run it is; "
            "only incidents of newer runs have a history"
        )
    return run_dir


def _steps_of_an_iteration(incident: Incident) -> tuple[int, int]:
    """How many steps an environment takes in an iteration, and how many of them come before the bad one."""
    facts, ppo, repeat = incident.facts, incident.config.ppo, incident.config.env.action_repeat
    per_unroll = ppo.unroll_length * repeat
    step = facts["unroll"] * per_unroll + facts["step"] * repeat + facts["repeat"]
    return ppo.rows // facts["num_envs"] * per_unroll, step


def starting_place(run_dir: Path, before: int, reach: int, tell: Tell) -> Place:
    """The start of a rerun: the newest checkpoint before all wanted steps.

    Where there is none, it is the beginning of the run if that is hardly further, and the oldest checkpoint before the
    incident if not: a whole run again for a few more steps would be too long a way.

    Args:
        run_dir: The run's folder.
        before: The incident's iteration, those given up included.
        reach: How many iterations are wanted before it.
        tell: Called with what is damaged.
    """
    directory, oldest = run_dir / "checkpoints", Place(0, 0)
    steps = [step for step in steps_in(directory) if step < before]
    if not steps:
        return oldest
    manager = open_manager(directory, None)
    try:
        for step in reversed(steps):
            try:
                host, manifest = read_json(manager, directory, step)
                place = Place(step, HostState.of(host["host"]).attempts.lost_iterations)
                if place.at >= before:
                    continue
                read_arrays(manager, step, "state", manifest.state)  # for their checksums
                oldest = place
            except Damaged as error:
                tell(f"checkpoint {step} is damaged ({error}); an older one is taken, or the beginning")
                continue
            if place.at < before - reach:
                return place
    finally:
        manager.close()
    return Place(0, 0) if before <= 2 * reach else oldest


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


def _config(incident: Incident, start: Place, bad: Place) -> Config:
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


def _train(config: Config, folder: Path, bad: Place, factories: Factories) -> Any:
    """Trains until the incident's iteration is done; what was recorded, on the host."""
    loop: TrainingLoop

    def look(_step: int, _row: Any) -> None:
        host = loop.single.host
        if Place(host.iteration, host.attempts.lost_iterations).at >= bad.at:
            raise _ThereAgain  # before anything is made of this iteration: it may have been the run's last

    loop = TrainingLoop(config, folder, look, factories=factories)
    try:
        stop_reason = loop.run().stop_reason
    except _ThereAgain:
        return jax.device_get(loop.single.state.incident)
    if stop_reason is StopReason.interrupted:
        raise KeyboardInterrupt
    raise ConfigError(
        f"{folder}: trained again, this run ended after {loop.single.host.iteration} iterations, before iteration "
        f"{bad.iteration}, the incident's ({stop_reason.name}: {stop_reason.meaning}), so it was another one; "
        "the history needs the machine, the versions and the code that the run had"
    )


def _by_path(steps: Any) -> dict[str, np.ndarray]:
    return {describe(path, x).path: x for path, x in jax.tree_util.tree_flatten_with_path(steps)[0]}
