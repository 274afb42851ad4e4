"""Flags of JAX with which no run works are one line."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import pytest
from toys import TINY, PointMass

import rlstable
import rlstable.brax_ppo as ppo
from rlstable.cli.compose import compose
from rlstable.compilation.jax_flags import check_flags
from rlstable.config import ConfigError
from rlstable.doctor.checkup import examine
from rlstable.policy.saved_run import open_run

REJECTED = {
    "debug_nans": (True, "JAX would end the run at the first NaN"),
    "debug_infs": (True, "JAX would end the run at the first infinity"),
    "enable_x64": (True, "training computes in float32"),
    "disable_jit": (True, "training runs compiled programs"),
    "no_tracing": (True, "training traces its programs"),
    "numpy_rank_promotion": ("raise", "training and physics broadcast arrays"),
    "numpy_dtype_promotion": ("strict", "training and physics mix types of numbers"),
    "enable_custom_prng": (True, "random keys are arrays of integers"),
    "legacy_prng_key": ("error", "random keys are arrays of integers"),
    "transfer_guard": ("disallow", "each run copies random keys and metrics"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_flag_set_by_a_program_is_one_line_of_every_function_that_runs_an_environment(
    name: str, tmp_path: Path
) -> None:
    value, reason = REJECTED[name]
    before, config = getattr(jax.config, f"jax_{name}"), compose(TINY)
    functions = (
        lambda: rlstable.fit("fast", run_dir=tmp_path / "run", logging="quiet"),
        lambda: ppo.train(PointMass(), num_timesteps=1, run_dir=tmp_path / "run"),
        lambda: examine(config, compiles=False),
        lambda: open_run(tmp_path),
    )
    jax.config.update(f"jax_{name}", value)
    try:
        for function in functions:
            with pytest.raises(ConfigError) as error:
                function()
            assert str(error.value).startswith(f"JAX_{name.upper()}={value}: {reason}")
            assert str(error.value).endswith(f"; unset JAX_{name.upper()}")
    finally:
        jax.config.update(f"jax_{name}", before)
    assert not list(tmp_path.iterdir())


def test_flag_in_the_shell_ends_the_command_with_the_code_of_a_configuration_error(tmp_path: Path) -> None:
    words = ["env=fast", f"hydra.run.dir={tmp_path / 'run'}", "logging.console=off"]
    environment = {**os.environ, "JAX_NUMPY_RANK_PROMOTION": "raise"}
    command = [sys.executable, "-m", "rlstable.train", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("rlstable: JAX_NUMPY_RANK_PROMOTION=raise: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flag",
    [jax.numpy_rank_promotion("warn"), jax.transfer_guard("log"), jax.default_prng_impl("rbg"), jax.log_compiles(True)],
)
def test_flags_that_work_are_accepted(flag: AbstractContextManager[None]) -> None:
    with flag:
        check_flags()
