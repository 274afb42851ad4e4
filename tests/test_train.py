"""The training command as a user types it: its output, exit code and files."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, SMALLEST, printed_by, typed
from saved import lines, result
from toys import PointMass

from rlstable import train

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs", "here")
TINY = [*SMALLEST, "devices=1", "total_steps=128", "eval.num_evals=1"]
run = functools.partial(typed, train.main)


# Mistakes that only the environment, the devices or the folder show; those of a word are in cli/test_mistakes.py.
BAD_INPUT = {
    "indivisible devices": ([*TINY, "devices=3"], "ppo.batch_size: 8 does not divide evenly among 3 devices; 12"),
    "no such class": (["env=import", "env.name=toys:PointMas"], "env.name: module toys has no 'PointMas'; did you"),
    "arguments it does not take": ([*TINY, "env.kwargs={colour: red}"], "env.kwargs: toys:PointMass cannot be built"),
    "a reset that is never clean": ([*TINY, "env.kwargs={bad_resets: 1.0}"], "env.name: none of 80 resets"),
    "observation without that key": (
        [*TINY, "env.kwargs={named: true}", "network.policy_obs_key=pixels"],
        "network.policy_obs_key: the observation has no 'pixels'; it has privileged_state, state",
    ),
    "configuration that cannot be read": (["resume=torn"], "run: torn/config.yaml cannot be read: "),
    "model that cannot be read": (["env=robot_stand", "env.xml=file"], "env.xml: file cannot be read: "),
    "robot elsewhere": (["env=ant", "env.xml=a.xml"], "env.xml: needs env=robot, not env.source=brax"),
    "no robot": (["env=robot"], "env.xml: is missing"),
    "folder that cannot be made": (["hydra.run.dir=file/run"], "hydra.run.dir: cannot write to file"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "torn").mkdir()
    (here / "torn" / "config.yaml").write_text("a: [")
    (here / "file").write_text("in the way")
    assert run(*args) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.replace(f"{here}/", "").startswith(f"rlstable: {message}")
    assert not (here / "runs").exists(), "a mistake leaves nothing behind"


def test_help_and_cfg_job_print_recipes_and_configuration_without_a_run_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert "python -m rlstable.train env=humanoid" in printed
    assert "env: ant, fast, gymnasium, halfcheetah, hopper" in printed
    assert len(printed.splitlines()) <= 40 and "--help=all lists all keys" in printed
    assert run("--help=all", "env=ant") == 0
    assert "  learning_rate_schedule_max_lr: 0.01\n" in capsys.readouterr().out
    assert run("env=ant", "ppo=ant", "guards=strict", "--cfg", "job") == 0
    composed = yaml.safe_load(capsys.readouterr().out)
    assert composed["env"]["name"] == "ant"
    assert composed["ppo"]["learning_rate"] == 3e-4
    assert composed["guards"]["limiters"]["gradient_norm"] == 1.0
    assert not (here / "runs").exists()


def test_first_line_of_a_run_waits_for_no_numpy_rich_or_jax() -> None:
    code = (
        "import sys, rlstable.train as t\n"
        "def notice(*_):\n"
        "    print(sorted({'jax', 'numpy', 'rich'} & set(sys.modules)))\n"
        "    sys.exit()\n"
        "t.recipes.notice = notice\n"
        "sys.argv[1:] = ['env=ant']\n"
        "t.main()"
    )
    assert printed_by(code) == ["[]"]


def test_uncaught_interrupt_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second Ctrl-C in a sweep; the job handled the first."""

    def main() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "main", main)
    with pytest.raises(SystemExit) as stopped:
        train.command()
    assert stopped.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "rlstable: interrupted"


def test_command_trains_resumes_and_prints_the_next_commands(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, "env.kwargs={bound: 2.0}") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("recipe: default, as ppo=default asks\n")
    for wanted in ("compiling training", "step", "stop reason", "completed", "resume="):
        assert wanted in printed
    (folder,) = (here / "runs" / "toys.PointMass").iterdir()
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["env"]["kwargs"] == {"bound": 2.0}

    resume = f"resume={folder.relative_to(here)}"
    assert run(resume, "total_steps=256") == 0
    assert result(folder)["step"] == 256
    assert [row["step"] for row in lines(folder / "metrics.jsonl")] == [64, 128, 192, 256]
    assert [path.name for path in (here / "runs" / "toys.PointMass").iterdir()] == [folder.name]

    capsys.readouterr()
    before = (folder / "config.yaml").read_bytes()
    assert run(resume, "network.policy_hidden_layer_sizes=[9]") == 2
    assert "float32[8] there and float32[9] here" in capsys.readouterr().err
    assert (folder / "config.yaml").read_bytes() == before
    assert run(resume, "env=ant") == 2
    assert "was trained on toys:PointMass, not on ant" in capsys.readouterr().err


def sweep_results(here: Path) -> tuple[Path, list[dict[str, Any]]]:
    (sweep,) = (here / "runs" / "sweeps").iterdir()
    return sweep, [result(sweep / name) for name in ("0", "1")]


def test_sweep_continues_after_a_failing_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", *TINY, "seed=-1,1") == 2
    captured = capsys.readouterr()
    sweep, results = sweep_results(here)
    assert [result["stop_reason"] for result in results] == ["config_error", "completed"]
    written = [json.loads((sweep / name / "overrides.json").read_text()) for name in ("0", "1")]
    assert written == [result["overrides"] for result in results]
    assert [overrides[-1] for overrides in written] == ["seed=-1", "seed=1"]
    assert (sweep / "1" / "checkpoints").is_dir()
    assert "rlstable: seed: input should be greater than or equal to 0, got -1" in captured.err
    table = captured.out[captured.out.index("sweep runs/") :]
    assert all(word in table for word in ("config_error", "completed", "seed=1"))


class Preempted(PointMass):
    """The process gets SIGTERM when the first environment is made; a second signal would end it at once."""

    sent = False

    def __init__(self) -> None:
        super().__init__()
        if not Preempted.sent:
            Preempted.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_signal_ends_all_jobs_of_a_sweep(here: Path) -> None:
    """Jobs that have not started end as well when a node is taken away."""
    assert run("-m", *TINY, "env.name=test_train:Preempted", "seed=0,1") == 143
    _, results = sweep_results(here)
    assert [(result["stop_reason"], result["step"]) for result in results] == [("preempted", 0)] * 2


def test_signal_while_a_program_compiles_ends_the_run_at_once(here: Path) -> None:
    """Compilation takes seconds to minutes; a preempted run must not wait for it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    large = [f"network.value_hidden_layer_sizes={[64] * 16}".replace(" ", ""), "logging.console=lines"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlstable.train", *TINY, *large], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("compiling training"):
            break
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "stop reason  preempted: " in output and "compiled training" not in output
    second = "a second signal stops it at once, without saving (nothing has been saved yet)"
    assert f"SIGTERM: the run saves and stops; {second}\n" in output
    (folder,) = (here / "runs" / "toys.PointMass").iterdir()
    assert (result(folder)["stop_reason"], result(folder)["step"]) == ("preempted", 0)


def test_command_trains_several_seeds_and_resumes_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, "seeds=2", "seed=3", "hydra.run.dir=here") == 0
    said = capsys.readouterr().out
    assert re.search(r"seed 3 +completed, return", said) and re.search(r"seed 4 +completed, return", said)
    assert re.search(r"rlstable\.evaluate run=here/seed-[34]\n", said)
    assert run("resume=here", "total_steps=192") == 0
    assert re.search(r"steps +192 each", capsys.readouterr().out)
    assert [result(here / "here" / f"seed-{seed}")["step"] for seed in (3, 4)] == [192, 192]
