"""Examines a configuration on this machine before training: physics, rewards, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
from jax.sharding import Mesh

from rlstable.compilation.xla import check_flags, enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.config.extras import install
from rlstable.config.ppo import PPOConfig
from rlstable.config.run import EnvConfig
from rlstable.config.schema import first_line
from rlstable.device import machine
from rlstable.device.mesh import make_mesh
from rlstable.device.mjx import uses_warp
from rlstable.doctor import robot as look
from rlstable.doctor import trial
from rlstable.doctor.lints import SEVERITIES, Finding, Severity, overlaps
from rlstable.doctor.robot import RobotFacts
from rlstable.envs.mujoco_model import model_of
from rlstable.io.versions import versions
from rlstable.robot.model import Robot
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise import memory
from rlstable.supervise.memory import FULL, TIGHT, Footprint, bytes_of, readable


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory in bytes; None if unknown."""

    footprint: Footprint | None  # of the compiled program per device
    needed: int | None  # upper bound over all devices that share the limit
    limit: int | None
    per_environment: int  # state of each environment between steps

    @property
    def share(self) -> float | None:
        return None if self.needed is None or not self.limit else self.needed / self.limit


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of all checks."""

    task: str
    engine: str
    machine: dict[str, str]  # devices and versions, each a line
    memory: Memory | None  # of training; None if the program could not be built
    findings: tuple[Finding, ...]  # worst first
    robot: RobotFacts | None = None  # of a model file

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def verdict(self) -> str:
        errors, warnings = self.count("error"), self.count("warning")
        counts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((errors, "error"), (warnings, "warning")) if n]
        head = "not ready" if errors else "ready"
        return f"{head}, with {' and '.join(counts)}" if counts else head

    @property
    def exit_code(self) -> int:
        return 1 if self.count("error") else 0


def examine(config: Config, compiles: bool = True, notify: Callable[[str], None] = lambda _: None) -> Report:
    """Runs all checks; a `ConfigError` if the configuration cannot work, with the message of `rlstable.train`.

    `compiles` also compiles the training program for its memory, which takes seconds to minutes. `notify` is called
    with messages about the progress.
    """
    check_flags()
    mesh = make_mesh(1 if config.seeds > 1 else config.devices)
    config.ppo.require_devices(mesh.size)
    not_cached = enable_program_cache(config.compile_cache)  # training then finds the programs compiled here
    if not_cached is not None:
        notify(f"compiled programs are not cached for training (compile_cache): {not_cached}")
    setup = TrainingSetup(config, mesh)
    env = setup.single
    this_machine = machine_of()
    engine, model = setup.loaded.backend or "mjx", model_of(env)
    looked: RobotFacts | None = None
    in_jax = config.env.source == "robot" and not uses_warp(env)
    findings = machine_findings(this_machine, in_jax)
    if model is None:
        what = "the environment has no MuJoCo model (sys.mj_model or mj_model), so that its physics was not examined"
        findings.append(Finding("note", "physics", (), what, "nothing, if the environment needs no MuJoCo"))
    elif config.env.source == "robot":
        robot: Robot = cast(Any, env).unwrapped.robot
        looked, found = _robot(config.env, robot, notify)
        findings += [*overlaps(model, robot.home), *found]
    elif engine in ("mjx", "native"):  # Brax's own engines have other contacts
        notify("simulating zero and random actions")
        start = trial.of_model(model)
        findings += overlaps(model) + trial.divergence(start, trial.trials(start))
    settings, usage = config.supervise.memory, None
    try:
        usage = _memory(config.ppo, settings.limit_gib, setup, mesh, compiles, notify)
        findings += memory_findings(usage, settings.adapt)
    except ConfigError:
        raise
    except Exception as error:  # training may take a smaller plan where the device refuses memory
        what = f"the training program cannot be built: {type(error).__name__}: {first_line(error)}"
        findings.append(Finding("error", "program", (), what, "python -m rlstable.train prints the traceback"))
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(config.env.name, engine, this_machine, usage, tuple(findings), looked)


def _robot(env: EnvConfig, robot: Robot, notify: Callable[[str], None]) -> tuple[RobotFacts, list[Finding]]:
    """Facts and findings about a robot, and a page that shows the robot at home."""
    task, file = env.task, env.xml
    assert task is not None and file is not None  # of a robot
    notify("simulating zero and random actions, and drawing the robot at home")
    page = Path("runs", "doctor", Path(file).stem, "home.html")
    look.draw(robot, page)
    return look.facts(robot, task, file, page), look.findings(robot, task)


def machine_of() -> dict[str, str]:
    """Facts about this machine, a line each."""
    first, cores = jax.devices()[0], machine.share_of_cores(1)
    kind = "" if first.device_kind == first.platform else f" ({first.device_kind})"
    return {
        "device": f"{jax.device_count()} x {first.platform}{kind}",
        "processor": f"{machine.name()}, {cores} {'core' if cores == 1 else 'cores'}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }


def machine_findings(found: Mapping[str, str], robot_in_jax: bool) -> list[Finding]:
    """Finds an NVIDIA GPU that simulates a robot with MJX in JAX."""
    if not robot_in_jax or "NVIDIA" not in found["device"]:
        return []
    what, advice = "MJX in JAX is slow for robots on an NVIDIA GPU", f"MJX-Warp: {install('warp')}, and env.impl=auto"
    return [Finding("note", "physics", (), what, advice)]


def _memory(
    ppo: PPOConfig, gib: float | None, setup: TrainingSetup, mesh: Mesh, compiles: bool, notify: Callable[[str], None]
) -> Memory:
    notify("tracing the environment")
    shapes = setup.shapes()
    needs = None
    if compiles:
        notify("compiling the training program to estimate its memory (--no-compile skips this)")
        needs = memory.footprint(setup.compiled(shapes).executable)
    return Memory(
        footprint=needs,
        needed=memory.needed(needs, mesh),
        limit=memory.limit(mesh.devices.flat[0], gib),
        per_environment=bytes_of(shapes.env_state) // ppo.num_envs,
    )


def memory_findings(usage: Memory, adapts: bool) -> list[Finding]:
    """Finds a program that needs nearly all memory; `adapts` is whether the supervisor may divide the program."""
    if usage.share is None or usage.share <= TIGHT:
        return []
    divided = ", and will be divided" if adapts and usage.share > FULL else ""
    what = f"training needs {readable(usage.needed or 0)} of {readable(usage.limit or 0)}{divided}"
    advice = "a smaller ppo.num_envs, ppo.batch_size, ppo.num_minibatches or ppo.unroll_length"
    return [Finding("error" if usage.share > 1 and not adapts else "warning", "memory", (), what, advice)]
