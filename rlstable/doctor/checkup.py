"""Examines a configuration on this machine before training: arithmetic, physics, rewards, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from rlstable.compilation.jax_flags import check_flags
from rlstable.compilation.xla import enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.config.extras import install
from rlstable.device import sharding
from rlstable.device.seed_devices import device_count_for
from rlstable.doctor import actuator_lint, reward_scale, two_episodes
from rlstable.doctor.finding import Finding
from rlstable.doctor.physics_lint import lint
from rlstable.doctor.playing import play
from rlstable.doctor.surroundings import Surroundings, surroundings
from rlstable.envs.mujoco_model import model_of
from rlstable.runner.iteration_time import REMEDY, long_iteration
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise import arithmetic, memory
from rlstable.supervise.arithmetic import Accuracy
from rlstable.supervise.memory import FULL, TIGHT, Footprint, bytes_of, readable
from rlstable.supervise.memory_bound import experience_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory that the training program needs and memory that is available, in bytes.

    Attributes:
        footprint: Memory of the compiled program per device; None if not compiled or not reported by the backend.
        needed: Upper bound over all devices that share the limit; None if unknown.
        limit: Usable memory; None if unknown.
        live: Memory in use now; None if unknown.
        per_environment: State of each environment between steps.
        rows: Lower bound of the experience of one iteration, over all devices.
    """

    footprint: Footprint | None
    needed: int | None
    limit: int | None
    live: int | None
    per_environment: int
    rows: int

    @property
    def share(self) -> float | None:
        """Share of the limit that training needs."""
        return None if self.needed is None or not self.limit else self.needed / self.limit


@dataclasses.dataclass(frozen=True)
class Environments:
    """Number of environments that can run in parallel.

    Attributes:
        configured: `ppo.num_envs`.
        most: The largest allowed number that certainly fits; None if unknown or if none fits.
        allowed: All numbers that divide the batch and are multiples of the number of devices.
    """

    configured: int
    most: int | None
    allowed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of all checks.

    Attributes:
        task: Name of the environment.
        engine: Physics engine.
        surroundings: Devices, versions, settings.
        products: Accuracy of matrix products by level.
        x64_error: Error of a float64 product under `jax.enable_x64()`; 0 if float64 works.
        memory: Memory of training; None if the program could not be built.
        environments: Number of environments; None if the program could not be built.
        findings: Findings, worst first.
    """

    task: str
    engine: str
    surroundings: Surroundings
    products: dict[str, Accuracy]
    x64_error: float
    memory: Memory | None
    environments: Environments | None
    findings: tuple[Finding, ...]

    def count(self, severity: str) -> int:
        """Returns the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The report in one line."""
        errors, warnings = self.count("error"), self.count("warning")
        too_large = any(finding.severity == "error" and finding.check == "memory" for finding in self.findings)
        head = "will not fit" if too_large else "not ready" if errors else "ready"
        counts = (_counted(errors - too_large, "more error" if too_large else "error"), _counted(warnings, "warning"))
        also = " and ".join(text for text in counts if not text.startswith("0 "))
        return f"{head}, with {also}" if also else head

    @property
    def exit_code(self) -> int:
        """0 if training can begin, 1 if training would fail."""
        return 1 if self.count("error") else 0


def examine(config: Config, compiles: bool = True, notify: Callable[[str], None] = lambda _: None) -> Report:
    """Runs all checks.

    Args:
        config: The configuration.
        compiles: Whether to compile the training program for its memory, which takes seconds to minutes.
        notify: Called with messages about the progress.

    Raises:
        ConfigError: The configuration cannot work; the message is that of `rlstable.train`.
    """
    check_flags()
    mesh = sharding.make_mesh(config.devices)
    if config.seeds > 1:  # each seed trains on one device
        device_count_for(config.seeds, mesh.size, config.devices)
        mesh = sharding.make_mesh(1)
    config.require_devices(mesh.size)
    not_cached = enable_program_cache(config.compile_cache)  # training then finds the programs compiled here
    if not_cached is not None:
        notify(f"compiled programs are not cached for training (compile_cache): {not_cached}")
    setup = TrainingSetup(config, mesh)
    env = setup.single
    notify("measuring matrix products")
    products, x64_error = arithmetic.measure(), arithmetic.measure_x64()
    around = surroundings()
    engine = str(getattr(env, "backend", "mjx"))
    findings = [*_machine(around), *_precision(config, products, x64_error), *_physics(env, engine)]
    usage = environments = None
    try:
        usage = _memory(config, setup, mesh, compiles, notify)
        findings += _iteration(config, setup)
        if compiles:
            notify("playing random and extreme actions to measure the scale of rewards and the reach of actuators")
            played, model = play(env), model_of(env)
            findings += reward_scale.lint(config, played)
            if played.controls is not None and model is not None and played.controls.shape[-1] == model.nu:
                findings += actuator_lint.reach(model, played.controls)
            if config.env.may_keep_counters:
                notify("playing two episodes in a row")
                findings += two_episodes.lint(config, env)
    except ConfigError:
        raise
    except Exception as error:  # any error here would also end training
        message = next(iter(str(error).strip().splitlines()), "no message")
        what = f"the training program cannot be built: {type(error).__name__}: {message}"
        findings.append(Finding("error", "program", (), what, "python -m rlstable.train prints the traceback"))
    if usage is not None:
        environments = _environments(config, usage, mesh.size)
        findings += _fits(usage, environments, config.supervise.memory.adapt)
    order = ("error", "warning", "note")
    findings.sort(key=lambda finding: order.index(finding.severity))
    return Report(config.env.name, engine, around, products, x64_error, usage, environments, tuple(findings))


def _machine(around: Surroundings) -> list[Finding]:
    found = []
    if around.gpu_unused:
        found.append(
            Finding(
                "warning",
                "device",
                around.nvidia,
                f"there is an NVIDIA GPU, but JAX computes on {around.devices}",
                f"{install('cuda12')}, and check that JAX_PLATFORMS does not hide the GPU",
            )
        )
    if "JAX_DEFAULT_MATMUL_PRECISION" in around.settings:
        found.append(
            Finding(
                "warning",
                "precision",
                (),
                "JAX_DEFAULT_MATMUL_PRECISION is set, but training ignores it",
                "unset it, and use precision.matmul=default, high or highest",
            )
        )
    return found


def _precision(config: Config, products: dict[str, Accuracy], x64_error: float) -> list[Finding]:
    level, found = config.precision.matmul, []
    for name, kind in arithmetic.undelivered(products).items():
        found.append(
            Finding(
                "warning" if name == level else "note",
                "precision",
                (),
                f"precision.matmul={name} delivers only {kind} on this device",
                "another version of JAX or of the driver, or NVIDIA_TF32_OVERRIDE=0",
                {"bits": products[name].bits},
            )
        )
    if level == "default" and products[level].kind != "float32":
        found.append(
            Finding(
                "note",
                "precision",
                (),
                f"matrix products are {products[level].kind}, {products[level].bits:.0f} bits instead of 24",
                "fast and usually accurate enough; precision=highest if a task learns only on other devices",
                {"bits": products[level].bits},
            )
        )
    if x64_error > 0:
        problem = "is rejected" if math.isinf(x64_error) else f"has an error of {x64_error:.1g}"
        found.append(Finding("note", "precision", (), f"float64 {problem} on this device", "nothing if you need none"))
    return found


def _physics(env: Any, engine: str) -> list[Finding]:
    model = model_of(env)
    if model is None:
        what = "the environment has no MuJoCo model (sys.mj_model or mj_model), so that its physics was not examined"
        return [Finding("note", "physics", (), what, "nothing, if the environment needs no MuJoCo")]
    return lint(model, engine)


def _memory(config: Config, setup: TrainingSetup, mesh: Any, compiles: bool, notify: Callable[[str], None]) -> Memory:
    notify("tracing the environment")
    shapes = setup.shapes()
    needs = None
    if compiles:
        notify("compiling the training program to estimate its memory (--no-compile skips this)")
        needs = memory.footprint(setup.compiled(shapes).executable)
    device = mesh.devices.flat[0]
    networks = setup.ppo.networks
    rows, _ = experience_bytes(config, networks.select(shapes.env_state.obs), networks.action_size)
    return Memory(
        footprint=needs,
        needed=memory.needed(needs, mesh),
        limit=memory.limit(device, config.supervise.memory.limit_gib),
        live=memory.live(device),
        per_environment=bytes_of(shapes.env_state) // config.ppo.num_envs,
        rows=rows,
    )


def _iteration(config: Config, setup: TrainingSetup) -> list[Finding]:
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(setup.shapes().params))
    long = long_iteration(config, setup.loaded, parameters)
    return [] if long is None else [Finding("warning", "iteration", (), long, REMEDY)]


def _environments(config: Config, usage: Memory, devices: int) -> Environments:
    """Returns the numbers of environments, with a lower bound of the largest number that fits.

    The bound assumes that all memory grows with the number of environments, but the batch's memory does not. The same
    assumption would overestimate the savings of fewer environments, so that no estimate is made of them.
    """
    rows = config.ppo.rows
    allowed = tuple(n for n in range(devices, rows + 1, devices) if rows % n == 0)
    most = None
    if usage.share is not None and usage.share <= TIGHT:
        most = max(n for n in allowed if usage.share * n <= TIGHT * config.ppo.num_envs)
    return Environments(config.ppo.num_envs, most, allowed)


def _fits(usage: Memory, environments: Environments, adapts: bool) -> list[Finding]:
    if usage.share is None or usage.share <= TIGHT:
        return []
    divided = ", and will be divided" if adapts and usage.share > FULL else ""
    batch = "a smaller ppo.batch_size, ppo.num_minibatches or ppo.unroll_length"
    fewer = "a smaller ppo.num_envs"
    # The advice begins with the larger part.
    heavier = usage.rows >= usage.per_environment * environments.configured
    return [
        Finding(
            "error" if usage.share > 1 and not adapts else "warning",
            "memory",
            (),
            f"training needs {readable(usage.needed or 0)} of {readable(usage.limit or 0)}{divided}",
            f"{batch}, then {fewer}" if heavier else f"{fewer}, then {batch}",
            {"needed": float(usage.needed or 0), "limit": float(usage.limit or 0)},
        )
    ]


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
