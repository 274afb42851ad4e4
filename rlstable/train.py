"""The command: `python -m rlstable.train env=humanoid`.

Hydra composes the configuration, `TrainingLoop` runs it. A mistake is one line and
exit code 2; a job of a sweep never ends the process, since Hydra would drop the jobs after it.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rlstable.cli.compose import explain, register_resolvers, with_saved
from rlstable.cli.sweep import SweepSummary
from rlstable.compilation import background, sources
from rlstable.config import ConfigError, recipes
from rlstable.config.defaults import config_dir
from rlstable.config.renamed import with_new_names
from rlstable.io.run_folder import read_result, return_of, write_result
from rlstable.supervise.signals import Signals
from rlstable.supervise.stop_reasons import StopReason

# The score of a job that gave none: finite, since sweepers choke on inf and nan, and below any return worth having.
WORST_SCORE = -1e9

# A signal that stopped one job of a sweep is meant for those after it too.
_told_to_stop: list[StopReason] = []


def main() -> None:
    """Runs the command line and exits with the exit code of the stop reason."""
    register_resolvers()
    # Hydra prints its own page of advice for a mistake and exits with 1; with this it raises, and we say it in a line.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _told_to_stop.clear()
    SweepSummary.exit_codes.clear()
    # Hydra has no flag of ours.
    words = ["logging.verbose=true" if word in ("-v", "--verbose") else word for word in sys.argv[1:]]
    try:
        sys.argv[1:], warnings = with_new_names(words)
    except ConfigError as error:
        _complain(str(error))
        sys.exit(StopReason.config_error.exit_code)
    for warning in warnings:
        _complain(warning)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(composed: DictConfig) -> float:
        code, score = run_job(composed)
        codes.append(code)
        return score

    try:
        job()
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        _complain(str(error.__cause__ if isinstance(error.__cause__, ConfigError) else explain(error)))
        sys.exit(StopReason.config_error.exit_code)
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(StopReason.error.exit_code)
    except OSError as error:
        _complain(f"hydra.run.dir: cannot write to {error.filename}: {error.strerror}; choose another folder")
        sys.exit(StopReason.config_error.exit_code)
    # A launcher may have run the jobs in other processes, which left their codes in the folders.
    sys.exit(max([*codes, *SweepSummary.exit_codes], default=0))


def command() -> None:
    """Runs the command as a process and ends it."""
    sources.mark_process_unmodified()
    try:
        main()
    except SystemExit as end:
        background.exit_process(end)
    except KeyboardInterrupt:  # the second one, in a sweep
        _complain("interrupted")
        background.exit_process(SystemExit(StopReason.interrupted.exit_code))


def run_job(composed: DictConfig) -> tuple[int, float]:
    """Runs one configuration until it stops; nothing but a keyboard interrupt gets out.

    Returns:
        Exit code, and the best return, confirmed if possible, finite whatever happened.
    """
    options = HydraConfig.get()
    run_dir = Path(options.runtime.output_dir)
    overrides = list(options.overrides.task)
    in_sweep = options.mode is RunMode.MULTIRUN
    if in_sweep and _told_to_stop:
        stop_reason = _told_to_stop[0]
        fields = {
            "stop_reason": stop_reason.name,
            "exit_code": stop_reason.exit_code,
            "step": 0,
            "overrides": overrides,
        }
        write_result(run_dir, fields)
        return stop_reason.exit_code, WORST_SCORE
    if in_sweep:
        print(f"rlstable: job {options.job.num}: {' '.join(overrides)}", flush=True)
    try:
        if str(options.sweeper.get("direction")).endswith("minimize"):
            raise ConfigError("hydra.sweeper.direction: would look for the least return; sweep=optuna maximizes it")
        config = with_saved(composed, overrides, run_dir)
        told = recipes.notice(options.runtime.choices, overrides)
        if told is not None and config.resume is None and config.logging.console != "off":
            print(told, flush=True)
        with Signals(hard=not in_sweep) as signals:
            from rlstable.runner.loop import (
                TrainingLoop,  # jax and brax take seconds, which a mistake need not wait for
            )

            stop_reason = TrainingLoop(config, run_dir, signals=signals).run().stop_reason
        if stop_reason in (StopReason.interrupted, StopReason.preempted):
            _told_to_stop.append(stop_reason)
    except ConfigError as error:
        _complain(str(error))
        stop_reason = StopReason.config_error
    except Exception:
        traceback.print_exc()
        stop_reason = StopReason.error
    result = read_result(run_dir) or {"stop_reason": stop_reason.name, "exit_code": stop_reason.exit_code, "step": 0}
    if in_sweep:
        try:
            write_result(run_dir, result | {"overrides": overrides})
        except OSError as error:  # the jobs after it may have room
            _complain(f"{run_dir}: result.json could not be written: {error}")
    elif stop_reason is StopReason.config_error and run_dir.is_dir() and not any(run_dir.iterdir()):
        run_dir.rmdir()  # Hydra made it; a mistake leaves nothing behind
    score = return_of(result)
    return stop_reason.exit_code, WORST_SCORE if score is None else score


def _complain(message: str) -> None:
    print(f"rlstable: {message}", file=sys.stderr)


if __name__ == "__main__":
    command()
