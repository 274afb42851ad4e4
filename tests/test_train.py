"""The training command as a user types it: its output, exit code and files."""

from __future__ import annotations

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

from rlstable import train
from rlstable.compilation import background
from rlstable.io.run_folder import read_result
from rlstable.runner import loop
from rlstable.train import main

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "env=import", "ppo=default", "env.name=toys:PointMass", "env.episode_length=12", "devices=1", "total_steps=128",
    "eval.num_evals=1", "eval.num_envs=2",
    "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=2", "ppo.num_updates_per_batch=2", "ppo.unroll_length=4",
    "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]",
]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str) -> int:
    """Types `python -m rlstable.train args...` in a folder and returns the exit code."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["rlstable.train", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


BAD_INPUT = {
    "unknown environment": (["env=humanoyd"], "env: unknown option 'humanoyd'; did you mean humanoid?"),
    "name of Gymnasium": (["env=Ant-v5"], "env: unknown option 'Ant-v5'; did you mean ant?"),
    "other case": (["env=HALFCHEETAH-v4"], "env: unknown option 'HALFCHEETAH-v4'; did you mean halfcheetah?"),
    "name without underscores": (
        ["env=InvertedPendulum-v5"], "env: unknown option 'InvertedPendulum-v5'; did you mean inverted_pendulum?"
    ),
    "name that is part of another": (
        ["env=Humanoid-v5"], "env: unknown option 'Humanoid-v5'; did you mean humanoid?"
    ),
    "unknown key": (["ppo.lerning_rate=1"], "ppo.lerning_rate: unknown key; did you mean learning_rate?"),
    "unknown top-level key": (["totl_steps=5"], "totl_steps: unknown key; did you mean total_steps?"),
    "unknown group option": (["guards=strickt"], "guards: unknown option 'strickt'; did you mean strict?"),
    "text for a number": (["ppo.num_envs=many"], "ppo.num_envs: 'many' must be a number, not text"),
    "truth for a number": (["ppo.num_envs=true"], "ppo.num_envs: True must be a number, not a boolean"),
    "negative size": (["ppo.num_envs=-4"], "ppo.num_envs: input should be greater than 0, got -4"),
    "zero": (["total_steps=0"], "total_steps: input should be greater than 0, got 0"),
    "infinite": (["ppo.learning_rate=inf"], "ppo.learning_rate: inf must be a finite number"),
    "not a number": (["ppo.discounting=nan"], "ppo.discounting: nan must be a finite number"),
    "indivisible batch": (
        ["env=ant", "ppo=ant", "ppo.num_envs=48"],
        "ppo.num_envs: 48 does not divide batch_size * num_minibatches = 65536; 32 would fit",
    ),
    "indivisible devices": ([*TINY, "devices=3"], "ppo.batch_size: 8 does not divide evenly among 3 devices; 12"),
    "no such class": (["env=import", "env.name=toys:PointMas"], "env.name: module toys has no 'PointMas'; did you"),
    "no such module": (["env=import", "env.name=nowhere:Env"], "env.name: no module 'nowhere'"),
    "arguments it does not take": ([*TINY, "env.kwargs={colour: red}"], "env.kwargs: toys:PointMass cannot be built"),
    "a reset that is never clean": ([*TINY, "env.kwargs={bad_resets: 1.0}"], "env.name: none of 80 resets"),
    "seeds on several devices": (
        [*TINY, "devices=2", "seeds=3"],
        "devices: 2 devices cannot train equally many of 3 seeds; allowed here: 1, or null for the most that ",
    ),
    "an impossible pair": (["ppo.optimizer.weight_decay=0.1"], "ppo.optimizer.weight_decay: needs ppo.optimizer.name"),
    "observation without that key": (
        [*TINY, "env.kwargs={named: true}", "network.policy_obs_key=pixels"],
        "network.policy_obs_key: the observation has no 'pixels'; it has privileged_state, state",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("args", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, *args) == 2
    printed = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(printed) == 1
    assert printed[0].startswith(f"rlstable: {message}")
    assert not list(tmp_path.glob("runs/*/*/*")), "a mistake leaves nothing behind"


def test_first_lines_name_the_recipe_and_an_iteration_of_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "long_iteration", lambda *_: "an iteration will take about 9 min")
    assert run(monkeypatch, tmp_path, *TINY, "logging.console=plain", "eval.num_evals=0", "total_steps=64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "recipe: default, as ppo=default asks"
    said = lines.index("an iteration will take about 9 min; ppo=cpu has iterations of seconds")
    assert said < next(number for number, line in enumerate(lines) if "64 / 64" in line)


def test_unreadable_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.yaml").write_text("a: [")
    assert run(monkeypatch, tmp_path, "resume=torn") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("rlstable: run: torn/config.yaml cannot be read: ")


def test_run_folder_that_cannot_be_made_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert run(monkeypatch, tmp_path, "hydra.run.dir=file/run") == 2
    assert capsys.readouterr().err.startswith("rlstable: hydra.run.dir: cannot write to file")


def test_help_and_cfg_job_print_recipes_and_configuration_without_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "--help") == 0
    printed = capsys.readouterr().out
    assert "python -m rlstable.train env=humanoid" in printed
    assert "env: ant, fast, halfcheetah, hopper" in printed
    assert run(monkeypatch, tmp_path, "env=ant", "ppo=ant", "guards=strict", "--cfg", "job") == 0
    composed = yaml.safe_load(capsys.readouterr().out)
    assert composed["env"]["name"] == "ant"
    assert composed["ppo"]["learning_rate"] == 3e-4
    assert composed["guards"]["limiters"]["gradient_norm"] == 1.0
    assert not (tmp_path / "runs").exists()


def test_first_line_of_a_run_waits_for_no_numpy_rich_or_jax(tmp_path: Path) -> None:
    code = (
        "import sys, rlstable.train as t\n"
        "def notice(*_):\n"
        "    print(sorted({'jax', 'numpy', 'rich'} & set(sys.modules)))\n"
        "    sys.exit()\n"
        "t.recipes.notice = notice\n"
        "sys.argv[1:] = ['env=ant']\n"
        "t.main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("asked", [["--help"], ["env=ant", "--cfg", "job"], ["env=nowhere"], ["ppo.num_envs=0"]])
def test_command_that_does_not_train_does_not_import_jax(tmp_path: Path, asked: list[str]) -> None:
    code = (
        "import sys, rlstable.train as t\n"
        f"sys.argv[1:] = {asked}\n"
        "try: t.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'jax', 'brax', 'mujoco', 'flax', 'orbax', 'wandb'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_task_of_a_sweep_can_be_pickled_for_a_launcher_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joblib, Ray and submitit pickle the task with the variables that it closes over."""
    cloudpickle = pytest.importorskip("cloudpickle")
    pickled: list[bytes] = []

    def pickle_only(task: Any) -> Any:
        return lambda: pickled.append(cloudpickle.dumps(task))

    monkeypatch.setattr(train.hydra, "main", lambda **_: pickle_only)
    monkeypatch.setattr(sys, "argv", ["rlstable.train", "-m", "seed=0,1"])
    with pytest.raises(SystemExit):
        main()
    assert len(pickled) == 1


def test_uncaught_interrupt_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second Ctrl-C in a sweep; the job handled the first."""

    def main() -> None:
        raise KeyboardInterrupt

    background.build(lambda: None).result()  # waits for background compilation of other tests
    monkeypatch.setattr(train, "main", main)
    with pytest.raises(SystemExit) as stopped:
        train.command()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "rlstable: interrupted\n"


def test_command_trains_resumes_and_prints_the_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, *TINY, "env.kwargs={bound: 2.0}") == 0
    printed = capsys.readouterr().out
    for wanted in ("compiling training", "step", "stop reason", "completed", "resume="):
        assert wanted in printed
    (folder,) = (tmp_path / "runs" / "toys.PointMass").iterdir()
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["env"]["kwargs"] == {"bound": 2.0}

    relative = str(folder.relative_to(tmp_path))
    assert run(monkeypatch, tmp_path, f"resume={relative}", "total_steps=256") == 0
    assert json.loads((folder / "result.json").read_text())["step"] == 256
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [64, 128, 192, 256]
    assert [path.name for path in (tmp_path / "runs" / "toys.PointMass").iterdir()] == [folder.name]

    capsys.readouterr()
    before = (folder / "config.yaml").read_bytes()
    assert run(monkeypatch, tmp_path, f"resume={relative}", "network.policy_hidden_layer_sizes=[9]") == 2
    assert "float32[8] there and float32[9] here" in capsys.readouterr().err
    assert (folder / "config.yaml").read_bytes() == before
    assert run(monkeypatch, tmp_path, f"resume={relative}", "env=ant") == 2
    assert "was trained on toys:PointMass, not on ant" in capsys.readouterr().err


def test_sweep_continues_after_a_failing_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "-m", *TINY, "seed=-1,1") == 2
    captured = capsys.readouterr()
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    results = [json.loads((sweep / name / "result.json").read_text()) for name in ("0", "1")]
    assert [result["stop_reason"] for result in results] == ["config_error", "completed"]
    written = [json.loads((sweep / name / "overrides.json").read_text()) for name in ("0", "1")]
    assert written == [result["overrides"] for result in results]
    assert [overrides[-1] for overrides in written] == ["seed=-1", "seed=1"]
    assert (sweep / "1" / "checkpoints").is_dir()
    assert "rlstable: seed: input should be greater than or equal to 0, got -1" in captured.err
    table = captured.out[captured.out.index("sweep runs/") :]
    assert "config_error" in table
    assert "completed" in table
    assert "seed=1" in table


def test_signal_ends_all_jobs_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that have not started end as well when a node is taken away."""
    from rlstable.runner.loop import TrainingLoop

    train = TrainingLoop._train

    def signalled(self: TrainingLoop) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return train(self)

    monkeypatch.setattr(TrainingLoop, "_train", signalled)
    assert run(monkeypatch, tmp_path, "-m", *TINY, "seed=0,1") == 143
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    results = [json.loads((sweep / name / "result.json").read_text()) for name in ("0", "1")]
    assert [result["stop_reason"] for result in results] == ["preempted", "preempted"]
    assert [result["step"] for result in results] == [0, 0]


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGTERM, "preempted"), pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.slow)],
)
def test_signal_while_a_program_compiles_ends_the_run_at_once(tmp_path: Path, number: int, name: str) -> None:
    """Compilation takes seconds to minutes; a preempted run must not wait for it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    large = [f"network.value_hidden_layer_sizes={[64] * 16}".replace(" ", ""), "logging.console=plain"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlstable.train", *TINY, *large],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("compiling training"):
            break
    time.sleep(1.0)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == {"preempted": 143, "interrupted": 130}[name]
    assert f"stop reason  {name}: " in output
    assert "compiled training" not in output
    shown = {"preempted": "SIGTERM", "interrupted": "Ctrl-C"}[name]
    second = "a second signal stops it at once, without saving (nothing has been saved yet)"
    assert f"{shown}: the run saves and stops; {second}\n" in output
    (folder,) = (tmp_path / "runs" / "toys.PointMass").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["stop_reason"], result["step"]) == (name, 0)


def test_command_trains_several_seeds_and_resumes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path / "run", *TINY, "seeds=2", "seed=3", "hydra.run.dir=here") == 0
    said = capsys.readouterr().out
    assert re.search(r"seed 3 +completed, return", said) and re.search(r"seed 4 +completed, return", said)
    assert re.search(r"rlstable\.evaluate run=here/seed-[34]\n", said)
    assert run(monkeypatch, tmp_path / "run", "resume=here", "total_steps=192") == 0
    assert re.search(r"steps +192 each", capsys.readouterr().out)
    assert [read_result(tmp_path / "run" / "here" / f"seed-{seed}")["step"] for seed in (3, 4)] == [192, 192]  # type: ignore[index]
