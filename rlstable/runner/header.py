"""The header that a run prints before it trains: task, device, sizes, networks and folder."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import jax

from rlstable.config import Config
from rlstable.device import hosts, machine, sharding
from rlstable.runner.seed_run import SeedRun
from rlstable.supervise import memory
from rlstable.supervise.stop_reasons import short_path


def header(config: Config, run: SeedRun, run_dir: Path) -> list[tuple[str, str]]:
    """The lines of the header, as names and values.

    Args:
        config: The configuration of the whole run.
        run: The first seed.
        run_dir: The run folder.
    """
    return [
        ("task", f"{config.env.name}{_physics(run.programs.setup.loaded.backend)}"),
        ("device", _device(run)),
        ("steps", _steps(config, run.programs.num_envs)),
        ("networks", _networks(config, run)),
        ("run folder", short_path(run_dir)),
        *_services(config, run, run_dir),
    ]


def _services(config: Config, run: SeedRun, run_dir: Path) -> list[tuple[str, str]]:
    """The lines about TensorBoard and Weights & Biases: their folder or page, and the command that shows them."""
    logging, logbook = config.logging, run.log.logbook
    several = config.seeds > 1
    rows = []
    if logging.tensorboard:
        folder = run_dir if several else run_dir / "tensorboard"
        rows.append(("tensorboard", f"tensorboard --logdir {shlex.quote(short_path(folder))}"))
    if logging.wandb.mode == "offline" and logbook.wandb_run_id is not None:
        # A run that is resumed has one folder for each part.
        parts = f"{shlex.quote(short_path(run_dir))}{'/seed-*' * several}/wandb/offline-run-*"
        rows.append(("wandb", f"offline; afterwards wandb sync {parts}"))
    if logbook.wandb_url is not None:
        group = f", in the group {run.config.logging.wandb.group}" * several
        rows.append(("wandb", f"{logbook.wandb_url}{group}; its files are in {short_path(run.run_dir / 'wandb')}"))
    return rows


def _physics(backend: str | None) -> str:
    return "" if backend is None else f", physics {'C MuJoCo' if backend == 'native' else backend}"


def _device(run: SeedRun) -> str:
    mesh = run.programs.mesh
    if jax.default_backend() == "cpu":
        device = f"{machine.name()}, {machine.share_of_cores(1)} cores"
    else:
        device = f"{run.programs.device_count} x {sharding.device_kind(mesh)}"
    if hosts.count() > 1:
        device += f", {mesh.size} devices of {hosts.count()} processes"
    limit = memory.limit(mesh.local_devices[0])
    return device if limit is None else f"{device}, {memory.readable(limit)} of memory"


def _steps(config: Config, num_envs: int) -> str:
    ppo, per_iteration = config.ppo, config.env_steps_per_iteration
    unrolls = ppo.batch_size * ppo.num_minibatches // ppo.num_envs
    factors = [f"{num_envs:,} environments"]
    factors += [f"{unrolls} unrolls"] * (unrolls > 1) + [f"{ppo.unroll_length} steps"]
    factors += [f"action repeat {config.env.action_repeat}"] * (config.env.action_repeat > 1)
    iterations = math.ceil(config.total_steps / per_iteration)
    text = f"{' x '.join(factors)} = {per_iteration:,} per iteration, {iterations:,} iterations"
    if config.total_steps < per_iteration:
        text += f"; one iteration is more than total_steps={config.total_steps:,} and trained whole"
    return text


def _networks(config: Config, run: SeedRun) -> str:
    network = config.network
    sizes = {"policy": network.policy_hidden_layer_sizes, "value": network.value_hidden_layer_sizes}
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(run.state.params))
    layers = ", ".join(f"{name} {'-'.join(map(str, widths)) or 'linear'}" for name, widths in sizes.items())
    return f"{layers}, {parameters:,} parameters"
