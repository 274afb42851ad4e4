"""Opens the seeds of a run: their folders, logs and first or resumed states. Every part gets its own settings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path

from rlstable import faults
from rlstable.config import Config, ConfigError
from rlstable.device import hosts
from rlstable.device.precision import Level
from rlstable.device.shared import has_shared
from rlstable.envs.capture import cause_names
from rlstable.io.console import Console, SeedConsole
from rlstable.io.kept_model import keep
from rlstable.io.logbook import Logbook
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import (
    confirmed_of,
    discard_start,
    free_reserve,
    open_run_dir,
    read_result,
    require_the_same_seeds,
    seed_folder,
    seed_folders,
    write_config,
)
from rlstable.runner.decision import ReturnCheck
from rlstable.runner.host_state import HostState, Schedule, SeedKeys
from rlstable.runner.kept_teacher import keep_teacher
from rlstable.runner.listener import Listeners
from rlstable.runner.log import Callback, SeedLog
from rlstable.runner.programs import Programs
from rlstable.runner.resume import resume
from rlstable.runner.saving import Saving
from rlstable.runner.seed import Seed
from rlstable.runner.seeds import Result, Seeds
from rlstable.supervise.diagnosis import Signs, signs_of
from rlstable.supervise.incident import Incidents, limits_of
from rlstable.supervise.recovery import Recovery
from rlstable.supervise.snapshots import Snapshots
from rlstable.supervise.stop_reasons import StopReason, stays_ended


@dataclasses.dataclass(frozen=True)
class Opening:
    """Opens one seed in the run folder, or several in folders `seed-<seed>` of it.

    A failed start leaves nothing behind.
    """

    config: Config
    programs: Programs  # of all seeds
    run_dir: Path
    callback: Callback | None
    console: Console
    listeners: Listeners

    def open(self, seeds: Seeds) -> None:
        """Opens the unfinished seeds; a `ConfigError` if they cannot be trained together, or as for `seed`."""
        config = self.config
        if config.seeds == 1:
            seeds.opened[config.seed] = self.seed()
            return
        try:
            self._open_each(seeds)
            seeds.agree_on_program(Level(config.precision.matmul, config.precision.network))
        except BaseException:
            seeds.close()
            for folder in seed_folders(self.run_dir):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # only empty folders
            raise

    def seed(self) -> Seed:
        """Opens the folder of a seed; makes its first state or resumes the saved one. A `ConfigError` if it cannot."""
        config, run_dir, programs = self.config, self.run_dir, self.programs
        host, snapshots, setup = HostState(), Snapshots(programs.mesh), programs.setup(HostState())
        keys, fault = SeedKeys(config.seed, host), config.fault.of_seed(config.seed)
        settings = config.model_dump(mode="json")
        sinks = [faults.FailingSink(fault)] if fault.site == "sinks" else []
        logbook = Logbook(config.logging, settings, run_dir, self.console, sinks)
        signs = functools.partial(Signs, signs_of(config), config.ppo, config.env, config.eval.num_envs)
        log = SeedLog(config.seed, logbook, signs, host, setup.ppo, self.callback, self.console, self.listeners)
        saving = Saving(config.checkpoint, settings, fault, run_dir, host, programs, snapshots, log)
        programs.listeners.append(log.event)
        closing = contextlib.ExitStack()  # even if interrupted, so that the next run finds the folder free

        def open_folder() -> bool:
            resumes, saving.lock = open_run_dir(run_dir, config.resume, 1)
            closing.callback(saving.lock.release)
            closing.callback(lambda: None if saving.gone else free_reserve(run_dir))
            if not resumes and (run_dir / "metrics.jsonl").exists():  # only with resume=auto
                log.event("started_again", reason="the folder has no checkpoint, so its earlier metrics are deleted")
            return resumes

        resumes = True
        try:
            resumes = hosts.from_writer("resumes", open_folder)
            closing.callback(logbook.close)
            closing.callback(saving.checkpoints.close)
            for kind, fields in programs.notices:
                log.event(kind, **fields)
            # A resumed seed may have another precision or memory plan. A shared program takes the states of all seeds.
            state = setup.first_state(keys.init, keys.resets, fault, ahead=not resumes and not programs.shared)
            limits, causes = limits_of(config.guards), cause_names(setup.env.guards)
            about = {"seed": config.seed, "fault": fault.site, "versions": programs.versions, "config": settings}
            args = config.supervise.incident, limits, causes, about, log.event
            guards, watch, watches = config.guards, config.guards.return_watch, config.watches_return
            patience = {"policy_diverged": guards.policy.patience, "value_loss_exploded": guards.value_loss.patience}
            seed = Seed(
                config, run_dir, programs, host, keys, self._schedule(host), log, state, snapshots,
                Recovery(config.supervise.recovery, patience),
                ReturnCheck(watch, config.total_steps, host, keys, snapshots, log.event, watches),
                Incidents(run_dir, *args), saving, closing,
            )  # fmt: skip
            if resumes:
                resume(seed)
                seed.confirmed = confirmed_of(run_dir)
            else:
                seed.keep_last_good()
            if hosts.is_writer():
                write_config(run_dir, settings, programs.machine)
                keep(config.env, run_dir)
                keep_teacher(programs.teacher, run_dir)
                logbook.start(host.wandb_run_id, None if config.resume is None else host.logged_step)
        except BaseException:
            closing.close()
            if hosts.is_writer() and not resumes:
                discard_start(run_dir)
            raise
        else:
            return seed

    def _schedule(self, host: HostState) -> Schedule:
        config = self.config
        return Schedule(
            host=host,
            total_steps=config.total_steps,
            iteration_steps=config.env_steps_per_iteration,
            evaluations=config.eval.num_evals,
            recorded_every=config.render.every,
            resets_per_evaluation=config.ppo.num_resets_per_eval,
            refilled_every=config.env.reset_pool_refresh,
            copied_every=config.supervise.recovery.every,
            logged_every=config.logging.log_every,
        )

    def _open_each(self, seeds: Seeds) -> None:
        """Opens the unfinished seeds. The folder above them is locked until they hold their own locks."""
        config, run_dir = self.config, self.run_dir
        resumes, lock = open_run_dir(run_dir, config.resume, config.seeds)
        group = "/".join(run_dir.absolute().parts[-2:])
        with contextlib.ExitStack() as locked:
            locked.callback(lock.release)
            locked.callback(free_reserve, run_dir)  # each seed has its own
            if resumes:
                require_the_same_seeds(run_dir, config.each_seed)
            for number in config.each_seed:
                folder = seed_folder(run_dir, number)
                fields = read_result(folder) if resumes else None
                if fields is not None and stays_ended(fields, config.total_steps, config.eval.target_return):
                    value, reason = outcome_of(fields).value, StopReason[fields["stop_reason"]]
                    seeds.fields[number] = fields
                    seeds.results[number] = Result(reason, folder, fields["step"], {}, [], policy_return=value)
                else:
                    callback, console = functools.partial(seeds.take_row, number), SeedConsole(self.console, number)
                    args = self.programs, folder, callback, console, self.listeners
                    seeds.opened[number] = Opening(config.of_seed(number, group), *args).seed()
            write_config(run_dir, config.model_dump(mode="json"))
        if any(has_shared(seed.state.env_state) for seed in seeds.opened.values()):
            raise ConfigError(
                f"seeds: {config.env.name} keeps the contacts of all environments in one array (MJX-Warp), which "
                "cannot be mapped over seeds; train one seed per process with seeds=1, or use impl=jax"
            )
