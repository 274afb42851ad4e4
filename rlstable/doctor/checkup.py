"""Examines a configuration on this machine before anything is trained: arithmetic, physics, rewards, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from rlstable.compilation.xla import enable_program_cache
from rlstable.config import Config, ConfigError
from rlstable.device import sharding
from rlstable.doctor import reward_scale
from rlstable.doctor.finding import Finding
from rlstable.doctor.physics_lint import lint
from rlstable.doctor.surroundings import Surroundings, surroundings
from rlstable.envs.mujoco_model import model_of
from rlstable.runner.setup import TrainingSetup
from rlstable.supervise import arithmetic, memory
from rlstable.supervise.arithmetic import Accuracy
from rlstable.supervise.memory import FULL, TIGHT, Footprint, bytes_of, readable
from rlstable.supervise.memory_bound import experience_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory that the training program needs and memory that is available, in bytes.

    Attributes:
        footprint: Of the compiled program per device; None where it was not compiled or the backend does not say.
        needed: At most, over all devices that share the limit.
        limit: Bytes that may be used; None if unknown.
        live: In use now; None likewise.
        per_environment: State that each environment keeps between steps.
        rows: Experience of one iteration at least, over all devices.
    """

    footprint: Footprint | None
    needed: int | None
    limit: int | None
    live: int | None
    per_environment: int
    rows: int

    @property
    def share(self) -> float | None:
        """Part of the limit that is needed."""
        return None if self.needed is None or not self.limit else self.needed / self.limit


@dataclasses.dataclass(frozen=True)
class Environments:
    """How many environments may run in parallel.

    Attributes:
        configured: `ppo.num_envs`.
        most: The largest allowed number that fits for certain; None where that is not known, or none does.
        allowed: Every number that divides the batch and that the devices divide.
    """

    configured: int
    most: int | None
    allowed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was found.

    Attributes:
        task: Name of the environment.
        engine: What simulates it.
        surroundings: Devices, versions, settings.
        products: Accuracy of matrix products by level.
        x64_error: Of a float64 product under `jax.enable_x64()`, 0 where it works.
        memory: None where the program could not be examined.
        environments: Likewise.
        findings: The worst first.
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
        """How many findings there are of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The report in a line."""
        errors, warnings = self.count("error"), self.count("warning")
        too_large = any(finding.severity == "error" and finding.check == "memory" for finding in self.findings)
        head = "will not fit" if too_large else "not ready" if errors else "ready"
        counts = (_counted(errors - too_large, "more error" if too_large else "error"), _counted(warnings, "warning"))
        also = " and ".join(text for text in counts if not text.startswith("0 "))
        return f"{head}, with {also}" if also else head

    @property
    def exit_code(self) -> int:
        """0 where training can begin, 1 where something would make it fail."""
        return 1 if self.count("error") else 0


def examine(config: Config, compiles: bool = True, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Examines everything.

    Args:
        config: What would be trained.
        compiles: Whether to compile the training program for its memory, which takes from seconds to minutes.
        tell: Hears what is being done.

    Raises:
        ConfigError: The configuration cannot work, as `rlstable.train` would say it.
    """
    mesh = sharding.make_mesh(config.devices)
    config.require_devices(mesh.size)
    not_kept = enable_program_cache(config.compile_cache)  # what is compiled here need not be compiled where it trains
    if not_kept is not None:
        tell(f"what is compiled is not kept for training (compile_cache): {not_kept}")
    assembly = TrainingSetup(config, mesh)
    env = assembly.single
    tell("measuring matrix products")
    products, x64_error = arithmetic.measure(), arithmetic.measure_x64()
    around = surroundings()
    engine = str(getattr(env, "backend", "mjx"))
    findings = [*_machine(around), *_precision(config, products, x64_error), *_physics(env, engine)]
    usage = environments = None
    try:
        usage = _memory(config, assembly, mesh, compiles, tell)
        if compiles:
            tell("playing random actions for the scale of the rewards")
            findings += reward_scale.lint(config, env)
    except ConfigError:
        raise
    except Exception as error:  # whatever it is, training would end by it
        said = next(iter(str(error).strip().splitlines()), "no message")
        what = f"the training program cannot be built: {type(error).__name__}: {said}"
        findings.append(Finding("error", "program", (), what, "python -m rlstable.train prints where it comes from"))
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
                f"an NVIDIA GPU is here, but jax computes on {around.devices}",
                'pip install -e ".[cuda12]", and see that JAX_PLATFORMS does not hide it',
            )
        )
    if "JAX_DEFAULT_MATMUL_PRECISION" in around.settings:
        found.append(
            Finding(
                "warning",
                "precision",
                (),
                "JAX_DEFAULT_MATMUL_PRECISION is set, but training does not heed it",
                "unset it, and say precision.matmul=default, high or highest",
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
                f"precision.matmul={name} delivers no more than {kind} here",
                "another version of jax or of the driver, or NVIDIA_TF32_OVERRIDE=0",
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
                "quicker, and mostly good enough; precision=highest if a task learns elsewhere and not here",
                {"bits": products[level].bits},
            )
        )
    if x64_error > 0:
        said = "is refused" if math.isinf(x64_error) else f"is off by {x64_error:.1g}"
        found.append(Finding("note", "precision", (), f"float64 {said} on this device", "nothing, unless you need it"))
    return found


def _physics(env: Any, engine: str) -> list[Finding]:
    model = model_of(env)
    if model is None:
        what = "the environment has no MuJoCo model (sys.mj_model or mj_model), so its physics was not examined"
        return [Finding("note", "physics", (), what, "nothing, if it needs none")]
    return lint(model, engine)


def _memory(config: Config, assembly: TrainingSetup, mesh: Any, compiles: bool, tell: Callable[[str], None]) -> Memory:
    tell("tracing the environment")
    shapes = assembly.shapes()
    needs = None
    if compiles:
        tell("compiling the training program for its memory (--no-compile leaves it out)")
        needs = memory.footprint(assembly.compiled(shapes).executable)
    device = mesh.devices.flat[0]
    networks = assembly.ppo.networks
    rows, _ = experience_bytes(config, networks.select(shapes.env_state.obs), networks.action_size)
    return Memory(
        footprint=needs,
        needed=memory.needed(needs, mesh),
        limit=memory.limit(device, config.supervise.memory.limit_gib),
        live=memory.live(device),
        per_environment=bytes_of(shapes.env_state) // config.ppo.num_envs,
        rows=rows,
    )


def _environments(config: Config, usage: Memory, devices: int) -> Environments:
    """The most that fits even if all memory grew in proportion, which it does not: much of it is the batch's.

    Nothing is said of how much fewer would save, since that would err on the wrong side.
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
    # What weighs more comes first.
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
