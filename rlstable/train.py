"""The command: `python -m rlstable.train env=humanoid`.

Hydra composes the configuration, and `TrainingLoop` runs it. A configuration error is printed in one line with exit
code 2. A job of a sweep never ends the process, because Hydra would skip the remaining jobs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlstable.cli.compose import prepared, register_resolvers, with_saved
from rlstable.cli.mistakes import explain
from rlstable.compilation import background, sources
from rlstable.config import ConfigError, recipes
from rlstable.config.defaults import config_dir
from rlstable.io.outcome import outcome_of
from rlstable.io.run_folder import read_result, require_own, write_overrides, write_result
from rlstable.report.sweep_summary import SweepSummary
from rlstable.supervise.signals import Signals
from rlstable.supervise.stop_reasons import StopReason

# The score of a job without a return: finite, because sweepers reject inf and nan, and below every useful return.
WORST_SCORE = -1e9

_HELP = {"--help=all": ("--help", "hydra.help.footer='$CONFIG'")}  # Hydra puts the values into its template

# Stop reason of a signal that stopped one job of a sweep; the remaining jobs stop too.
_stopped_by_signal: list[StopReason] = []


def main() -> None:
    """Runs the command line and exits with the exit code of the stop reason."""
    register_resolvers()
    # By default Hydra prints a long help text for an error and exits with 1; with this flag it raises the error.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _stopped_by_signal.clear()
    SweepSummary.exit_codes.clear()
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(composed: DictConfig) -> float:
        code, score = run_job(composed)
        codes.append(code)
        return score

    try:
        sys.argv[1:] = prepared([new for word in sys.argv[1:] for new in _HELP.get(word, (word,))])
        job()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        cause = error if isinstance(error, ConfigError) else error.__cause__
        _print_error(str(cause if isinstance(cause, ConfigError) else explain(error)))
        sys.exit(StopReason.config_error.exit_code)
    except BrokenPipeError:  # the reader of the pipe, such as `| head`, has exited; discard the buffered output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(StopReason.error.exit_code)
    except OSError as error:
        _print_error(f"hydra.run.dir: cannot write to {error.filename}: {error.strerror}; choose another folder")
        sys.exit(StopReason.config_error.exit_code)
    # A launcher may have run the jobs in other processes; their exit codes are read from the run folders.
    sys.exit(max([*codes, *SweepSummary.exit_codes], default=0))


def command() -> None:
    """Runs the command and ends the process."""
    sources.mark_process_unmodified()
    if not {"-m", "--multirun"} & {*sys.argv}:  # the parent of a sweep may only wait for other processes
        gc.disable()  # until the imports are done, because objects of modules stay in use
    try:
        main()
    except SystemExit as end:
        background.exit_process(end)
    except KeyboardInterrupt:  # the second Ctrl-C, in a sweep
        _print_error("interrupted")
        background.exit_process(SystemExit(StopReason.interrupted.exit_code))


def run_job(composed: DictConfig) -> tuple[int, float]:
    """Runs one configuration until it stops; returns the exit code, and the return of its policy, always finite.

    The only exception that it raises is a keyboard interrupt.
    """
    options = HydraConfig.get()
    run_dir = Path(options.runtime.output_dir)
    overrides: Any = OmegaConf.to_container(options.overrides.task, resolve=False)
    in_sweep = options.mode is RunMode.MULTIRUN
    if in_sweep and _stopped_by_signal:
        stop_reason = _stopped_by_signal[0]
        write_result(run_dir, _untrained(stop_reason) | {"overrides": overrides})
        return stop_reason.exit_code, WORST_SCORE
    writes = False
    try:
        if in_sweep:
            print(f"rlstable: job {options.job.num}: {' '.join(overrides)}", flush=True)
            require_own(run_dir)
            write_overrides(run_dir, overrides)
            writes = True
        if str(options.sweeper.get("direction")).endswith("minimize"):
            raise ConfigError(
                "hydra.sweeper.direction: minimize would search for the lowest return; set it to maximize"
            )
        config = with_saved(composed, overrides)
        if config.resume is None and config.logging.console != "off":
            print(recipes.notice(overrides, config.recipe_for), flush=True)
        with Signals(owns_process=not in_sweep) as signals:
            # Importing JAX and Brax takes seconds; a configuration error is printed before.
            from rlstable.compilation.xla import use_one_thread
            from rlstable.device import hosts
            from rlstable.listeners import listeners_of
            from rlstable.runner.loop import TrainingLoop

            if not gc.isenabled():  # in the first job of the process
                gc.freeze()  # the collector then ignores the objects of the imports
                gc.enable()
            if config.computes_little and not recipes.has_accelerator():
                use_one_thread()
            loop = TrainingLoop(config, run_dir, signals=signals, listeners=listeners_of(config.render, config.logging))
            if loop.run_dir != run_dir:  # of the writer; Hydra made another one for this process
                _remove_if_empty(run_dir)
                run_dir = loop.run_dir
            writes = hosts.is_writer()
            stop_reason = loop.run().stop_reason
        if stop_reason in (StopReason.interrupted, StopReason.preempted):
            _stopped_by_signal.append(stop_reason)
    except ConfigError as error:
        _print_error(str(error))
        stop_reason = _announced(StopReason.config_error, str(error))
    except Exception as error:
        traceback.print_exc()
        stop_reason = _announced(StopReason.error, str(error))
    result = (read_result(run_dir) if writes else None) or _untrained(stop_reason)
    if in_sweep and writes:
        try:
            write_result(run_dir, result | {"overrides": overrides})
        except OSError as error:  # the remaining jobs may still be able to write
            _print_error(f"{run_dir}: result.json could not be written: {error}")
    elif stop_reason is StopReason.config_error:
        _remove_if_empty(run_dir)  # Hydra made the folder; a configuration error leaves no empty folder
    score = outcome_of(result).value
    return stop_reason.exit_code, WORST_SCORE if score is None else score


def _untrained(stop_reason: StopReason) -> dict[str, Any]:
    return {"stop_reason": stop_reason.name, "exit_code": stop_reason.exit_code, "step": 0}


def _announced(stop_reason: StopReason, message: str) -> StopReason:
    """Tells the other processes of the run that this one ends; returns the first cause of all."""
    hosts = sys.modules.get("rlstable.device.hosts")
    if hosts is None:
        return stop_reason
    return StopReason[hosts.announce(stop_reason.name, stop_reason.exit_code, message).stop_reason]


def _remove_if_empty(run_dir: Path) -> None:
    """Removes a folder without files, and those above it that its default name, `runs/<env>/<time>`, has made."""
    by_default = len(run_dir.parts) > 2 and run_dir.parts[-3] == "runs"
    with contextlib.suppress(OSError):
        for folder in (run_dir, run_dir.parent, run_dir.parent.parent)[: 3 if by_default else 1]:
            folder.rmdir()


def _print_error(message: str) -> None:
    print(f"rlstable: {message}", file=sys.stderr)


if __name__ == "__main__":
    command()
