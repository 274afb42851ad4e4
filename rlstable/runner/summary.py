"""The header and the summary that a run prints, and the files that it writes when it ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstable.device import hosts, machine
from rlstable.device.mesh import device_kind
from rlstable.device.mjx import uses_warp
from rlstable.envs.load import Loaded
from rlstable.io.console import Console
from rlstable.io.outcome import outcome_of
from rlstable.io.printed_commands import command, short_path
from rlstable.io.run_folder import (
    best_seed,
    free_reserve,
    has_checkpoint,
    seed_folders,
    seed_of,
    write_result,
)
from rlstable.policy.statistics import interquartile_mean
from rlstable.runner.listener import Listeners
from rlstable.runner.seed import Seed
from rlstable.supervise import memory
from rlstable.supervise.diagnosis import LOSS_NOT_FINITE, recovered_text
from rlstable.supervise.stop_reasons import GIVEN_UP, StopReason

_MOST_SIGNS = 3
_NOT_IN_EVENT = ("signs", "warnings")  # fields of `result.json` that the event `stopped` lacks


def header(seed: Seed, seeds: int, run_dir: Path) -> list[tuple[str, str]]:
    """The lines that a run prints before it trains, as names and values, from the first of its `seeds`."""
    config = seed.config
    model = "" if config.env.xml is None else f" with {Path(config.env.xml).name}"
    ppo = config.ppo
    imitated = f"imitated alone to {ppo.imitation_only:.0%} of the steps, beside PPO to {ppo.imitation_end:.0%}"
    return [
        ("task", f"{config.env.name}{model}{_physics(seed.setup.loaded)}"),
        ("device", _device(seed)),
        *getattr(getattr(seed.setup.loaded.env, "unwrapped", None), "header", ()),
        ("steps", _steps(seed)),
        ("networks", _networks(seed)),
        *([] if ppo.teacher is None else [("teacher", f"{ppo.teacher}, {imitated}")]),
        ("run folder", short_path(run_dir)),
        *_services(seed, seeds, run_dir),
    ]


def _services(seed: Seed, seeds: int, run_dir: Path) -> list[tuple[str, str]]:
    """The lines about TensorBoard and Weights & Biases: the command that shows or uploads a run, or its page."""
    logging, logbook, folder = seed.config.logging, seed.log.logbook, shlex.quote(short_path(run_dir))
    rows = [("tensorboard", f"tensorboard --logdir {folder}")] if logging.tensorboard else []
    if logging.wandb.mode == "offline" and logbook.wandb_run_id is not None:
        parts = f"{folder}{'/seed-*' * (seeds > 1)}/wandb/offline-run-*"  # a resumed run has one for each part
        rows.append(("wandb", f"offline; afterwards wandb sync {parts}"))
    if logging.wandb.mode == "disabled" and os.environ.get("WANDB_MODE") == "disabled":
        rows.append(("wandb", "disabled by WANDB_MODE"))
    return rows if logbook.wandb_url is None else [*rows, ("wandb", logbook.wandb_url)]


def _physics(loaded: Loaded) -> str:
    engine = "MJX-Warp" if uses_warp(loaded.env) else "C MuJoCo" if loaded.backend == "native" else loaded.backend
    return "" if engine is None else f", physics {engine}"


def _device(seed: Seed) -> str:
    mesh = seed.programs.mesh
    if jax.default_backend() == "cpu":
        device = f"{machine.name()}, {machine.share_of_cores(1)} cores"
    else:
        device = f"{mesh.size} x {device_kind(mesh)}"
    if hosts.count() > 1:
        device += f", {mesh.size} devices of {hosts.count()} processes"
    limit = memory.limit(mesh.local_devices[0])
    return device if limit is None else f"{device}, {memory.readable(limit)} of memory"


def _steps(seed: Seed) -> str:
    config, num_envs = seed.config, seed.programs.num_envs(seed.host)
    ppo, per_iteration = config.ppo, config.env_steps_per_iteration
    unrolls = ppo.batch_size * ppo.num_minibatches // ppo.num_envs
    factors = [f"{num_envs:,} environments"]
    factors += [f"{unrolls} unrolls"] * (unrolls > 1) + [f"{ppo.unroll_length} steps"]
    factors += [f"action repeat {config.env.action_repeat}"] * (config.env.action_repeat > 1)
    iterations = math.ceil(config.total_steps / per_iteration)
    text = f"{' x '.join(factors)} = {per_iteration:,} per iteration, {iterations:,} iterations"
    trained, played = config.env.training_length, config.env.episode_length
    text += f"; episodes of {trained:,} steps in training, {played:,} in evaluations" * (trained < played)
    if config.total_steps < per_iteration:
        text += f"; one iteration is more than total_steps={config.total_steps:,} and trained whole"
    return text


def _networks(seed: Seed) -> str:
    network = seed.config.network
    sizes = {"policy": network.policy_hidden_layer_sizes, "value": network.value_hidden_layer_sizes}
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(seed.state.params))
    layers = ", ".join(f"{name} {'-'.join(map(str, widths)) or 'linear'}" for name, widths in sizes.items())
    return f"{layers}, {parameters:,} parameters"


def describe(
    stop_reason: StopReason, fields: Mapping[str, Any], run_dir: Path, policy: Path | None, env_by_name: bool = True
) -> list[tuple[str, str]]:
    """The lines that a finished run prints, as names and values, from the fields of `result.json`.

    `policy` is its folder, with several seeds that of the best seed; None if nothing was saved. Without `env_by_name`
    the commands cannot load the environment, which is an object.
    """
    folder, seeds = short_path(run_dir), fields.get("seeds", {})
    ruined = [warning for warning in fields.get("warnings", []) if warning["name"] == LOSS_NOT_FINITE]
    rows = [
        ("stop reason", f"{stop_reason.name}: {stop_reason.meaning}"),
        *([("what to do", fields["advice"])] if "advice" in fields else []),
        *([("not saved", f"the last {fields['unsaved_steps']:,} steps")] if "unsaved_steps" in fields else []),
        *((f"seed {seed}", _of_seed(seed_fields)) for seed, seed_fields in seeds.items()),
        *_of_signs(fields, seeds),
        ("steps", f"{fields['step']:,}" + (" each" if seeds else "")),
        ("return", "interquartile mean " * bool(seeds) + outcome_of(fields).return_text),
        *_of_policy(fields, policy),
        ("time", f"{fields['seconds']:,.1f} s of training"),
        ("run folder", folder),
        *([("report", short_path(run_dir / "report.html"))] if (run_dir / "report.html").is_file() else []),
    ]
    if policy is not None and len(ruined) < max(len(seeds), 1):
        reasons = {seed_fields["stop_reason"] for seed_fields in seeds.values()} or {stop_reason.name}
        ended = {StopReason.completed.name, *(reason.name for reason in GIVEN_UP if seeds)}
        # A completed run can only continue with more steps.
        more = f" total_steps={2 * fields['step']}" if reasons <= ended else ""
        more += " eval.target_return=null" if StopReason.target_reached.name in reasons else ""
        if env_by_name:
            rows.append(("resume", f"{command('train', run_dir, 'resume=')}{more}"))
            rows.append(("evaluate", command("evaluate", policy, "run=")))
            rows.append(("render", command("render", policy, "run=")))
        rows.append(("load", f"rlstable.load_policy({json.dumps(short_path(policy), ensure_ascii=False)})"))
    return rows


def _of_policy(fields: Mapping[str, Any], policy: Path | None) -> list[tuple[str, str]]:
    """The line about the policy that the run hands over, with several seeds the policy of the best seed."""
    seeds = {str(seed): seed_fields for seed, seed_fields in fields.get("seeds", {}).items()}
    best = "" if policy is None or not seeds else str(seed_of(policy))
    text = outcome_of(seeds.get(best, fields)).policy_text
    return [] if policy is None or text is None else [("policy", f"seed {best}, " * bool(best) + text)]


def _of_seed(fields: Mapping[str, Any]) -> str:
    advice = f". {fields['advice']}" if "advice" in fields else ""
    return f"{fields['stop_reason']}, return {outcome_of(fields).return_text}{advice}"


def _of_signs(fields: Mapping[str, Any], seeds: Mapping[Any, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A line per sign of trouble, at most `_MOST_SIGNS`, signs that are over last; several seeds share a line."""
    by_name: dict[tuple[bool, str], list[tuple[Any, Mapping[str, Any]]]] = {}
    for seed, seed_fields in seeds.items() or [(None, fields)]:
        for name, sign in seed_fields.get("signs", {}).items():
            by_name.setdefault((bool(sign.get("recovered_step")), name), []).append((seed, sign))
    rows = []
    for _, logged in sorted(by_name.items(), key=lambda pair: pair[0][0])[:_MOST_SIGNS]:
        names = [str(seed) for seed, _ in logged if seed is not None]
        rows.append(("sign", _seed_prefix(names) + logged[0][1]["text"] + recovered_text(logged[0][1], "; ")))
    if len(by_name) > _MOST_SIGNS:
        rows.append(("signs", f"and {len(by_name) - _MOST_SIGNS:,} more in the report"))
    return rows


def describe_warnings(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The last lines that a finished run prints: one per warning; the same warning of several seeds is one line."""
    by_name: dict[str, list[tuple[str, str]]] = {}
    for seed, seed_fields in fields.get("seeds", {}).items() or [("", fields)]:
        for warning in seed_fields.get("warnings", []):
            by_name.setdefault(warning["name"], []).append((str(seed), warning["text"]))
    return [
        ("warning", _seed_prefix([seed for seed, _ in logged if seed]) + f"{name}: {logged[0][1]}")
        for name, logged in by_name.items()
    ]


def _seed_prefix(seeds: list[str]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}: " * bool(seeds)


def finish_files(
    fields: Mapping[str, Any], run_dir: Path, console: Console, listeners: Listeners, by_name: bool, gone: bool
) -> None:
    """Writes `result.json` and prints the summary. A file that cannot be written is only reported.

    Nothing is written if the folder is `gone`: deleted, moved or replaced. `by_name`: the environment is no object.
    """
    try:
        if not gone:
            free_reserve(run_dir)
            write_result(run_dir, fields)
    except OSError as error:
        console.message(f"result.json could not be written: {error}")
    if not gone:
        listeners.ended(run_dir, fields)
    saved = [] if gone else [folder for folder in (run_dir, *seed_folders(run_dir)) if has_checkpoint(folder)]
    policy = best_seed(run_dir) or saved[0] if saved else None
    rows = describe(StopReason[fields["stop_reason"]], fields, run_dir, policy, by_name)
    console.summary(rows + describe_warnings(fields))


def finish_seed(seed: Seed, stop_reason: StopReason) -> dict[str, Any]:
    """Ends a seed: completes its files and releases its folder; returns the fields of `result.json`."""
    log, saving = seed.log, seed.saving
    with contextlib.closing(seed):
        stop_reason = saving.final_stop_reason(stop_reason, seed.state)
        advice = saving.advice if stop_reason is StopReason.not_saved else seed.advice
        unsaved = saving.unsaved_steps()
        more = {**_policy_fields(seed), **({"unsaved_steps": unsaved} if unsaved else {})}
        seed.checkpoints.close()
        fields = log.result(stop_reason, seed.cause, advice, more)
        if hosts.is_writer():
            seed.event("stopped", **{name: value for name, value in fields.items() if name not in _NOT_IN_EVENT})
            log.logbook.wait()  # the report page reads it
            finish_files(fields, seed.run_dir, log.console, log.listeners, seed.config.env.has_name, saving.gone)
        return fields


def _policy_fields(seed: Seed) -> dict[str, Any]:
    """Fields of `result.json` about the policy that the run hands over; read by `io.outcome`.

    `return` is measured in fresh episodes if possible, else by the evaluation that chose the policy.
    """
    checkpoints, host, fields = seed.checkpoints, seed.host, dict(seed.confirmed)
    if not hosts.is_writer() or not seed.config.checkpoint.enabled or seed.saving.gone:
        return fields
    scores: dict[int, float | None] = dict(checkpoints.ranked())
    number: int | None = fields.get("confirmed_checkpoint", next(iter(scores), checkpoints.latest()))
    saved = None if number is None else checkpoints.host_data(number)
    if number is None or saved is None:
        return fields
    value = fields.get("confirmed_return", scores.get(number, host.last_return))
    known = [one for one in (value, host.best_return) if one is not None]
    fields |= {"return": value, "best_return": max(known, default=None)}
    about = saved["host"]
    origin = {"iteration": about["iteration"], "step": saved["step"]} | (about.get("replaced") or {})
    is_last = number == host.logged_iteration and host.replaced is None
    fields |= {"policy_iteration": origin["iteration"], "policy_step": origin["step"], "policy_is_last": is_last}
    if host.replaced is not None and "fallen_return" in host.replaced:
        fields["fallen_return"] = host.replaced["fallen_return"]
    return fields


def fields_of(seeds: Mapping[int, Mapping[str, Any]], stop_reason: StopReason | None = None) -> dict[str, Any]:
    """Fields of `result.json` of several seeds: the worst stop reason, interquartile means of returns."""
    each = list(seeds.values())
    worst = StopReason[max(each, key=lambda fields: int(fields["exit_code"]))["stop_reason"]] if each else None
    reason = stop_reason or worst or StopReason.error
    scored = [fields for fields in each if fields["best_return"] is not None]
    confirmed = [fields["confirmed_return"] for fields in scored if "confirmed_return" in fields]
    return {
        "stop_reason": reason.name,
        "exit_code": reason.exit_code,
        "step": max((fields["step"] for fields in each), default=0),
        "return": _iqm(outcome_of(fields).value for fields in each),
        "best_return": _iqm(fields["best_return"] for fields in each),
        "last_return": _iqm(fields["last_return"] for fields in each),
        **({"confirmed_return": _iqm(confirmed)} if confirmed and len(confirmed) == len(scored) else {}),
        "seconds": max((fields["seconds"] for fields in each), default=0.0),
        "rollbacks": sum(fields["rollbacks"] for fields in each),
        "warnings": [warning | {"seed": seed} for seed in sorted(seeds) for warning in seeds[seed]["warnings"]],
        "seeds": {seed: seeds[seed] for seed in sorted(seeds)},
    }


def _iqm(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(interquartile_mean(np.array(known))) if known else None
