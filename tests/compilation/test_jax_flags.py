"""Flags of JAX with which no run works are one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from toys import TINY, PointMass

import rlstable
import rlstable.brax_ppo as ppo
from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.doctor.checkup import examine
from rlstable.policy.saved_run import open_run

REJECTED = {
    "debug_nans": "JAX would end the run at the first bad number",
    "debug_infs": "JAX would end the run at the first bad number",
    "enable_x64": "training computes in float32",
    "disable_jit": "training runs compiled programs",
}


@pytest.mark.parametrize("name", REJECTED)
def test_flag_set_by_a_program_is_one_line_of_every_function_that_runs_an_environment(
    name: str, tmp_path: Path
) -> None:
    config = compose(TINY)
    functions = (
        lambda: rlstable.fit("fast", run_dir=tmp_path / "run", logging="quiet"),
        lambda: ppo.train(PointMass(), num_timesteps=1, run_dir=tmp_path / "run"),
        lambda: examine(config, compiles=False),
        lambda: open_run(tmp_path),
    )
    jax.config.update(f"jax_{name}", True)
    try:
        for function in functions:
            with pytest.raises(ConfigError) as error:
                function()
            assert str(error.value).startswith(f"JAX_{name.upper()}=True: {REJECTED[name]}")
            assert str(error.value).endswith(f"; unset JAX_{name.upper()}")
    finally:
        jax.config.update(f"jax_{name}", False)
    assert not list(tmp_path.iterdir())


def test_flag_in_the_shell_ends_the_command_with_the_code_of_a_configuration_error(tmp_path: Path) -> None:
    words = ["env=fast", f"hydra.run.dir={tmp_path / 'run'}", "logging.console=off"]
    environment = {**os.environ, "JAX_DEBUG_NANS": "1"}
    command = [sys.executable, "-m", "rlstable.train", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("rlstable: JAX_DEBUG_NANS=True: ")
    assert not (tmp_path / "run").exists()
