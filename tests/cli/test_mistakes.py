"""Common mistakes on a command line are one line each, and no folder is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import typed

from rlstable.config.extras import install
from rlstable.train import main

BRACKETS = "close each bracket and quote, and quote values with spaces or commas"
MISTAKES = [
    ("ppo.learning_rat=1e-3", "ppo.learning_rat: unknown key; did you mean learning_rate?"),
    ("lr=1e-3", "lr: unknown key; did you mean ppo.learning_rate?"),
    ("+foo=1", "foo: unknown key; allowed here: env, ppo, "),
    ("~foo", "foo: unknown key; allowed here: env, ppo, "),
    ("device=gpu", "device: there is no such key; JAX trains on a GPU if it finds one, and the environment variable "),
    ("env=humanoyd", "env: unknown option 'humanoyd'; did you mean humanoid?"),
    ("humanoid", "cannot read 'humanoid': '=' is missing; write env=humanoid, and quote values with spaces"),
    ("env=my/quad.xml", "env: my/quad.xml is a robot's file; write env=robot_velocity env.xml=my/quad.xml, or another"),
    ("env=Ant-v5", "env: unknown option 'Ant-v5'; did you mean ant?"),
    ("guards=none", "guards: unknown option 'none'; choose one of default, off, strict"),
    ("ppo.num_envs=many", "ppo.num_envs: 'many' must be a number, not text"),
    ("ppo.num_envs=[1", f"cannot read '[1': {BRACKETS}"),
    ("logging.wandb.name='it", f'cannot read "logging.wandb.name=\'it": write key=value; {BRACKETS}'),
    ("seed:3", f"cannot read 'seed:3': write key=value; {BRACKETS}"),
    ("env=robot env.task.contol_dt=1", "env.task.contol_dt: unknown key; did you mean control_dt?"),
    ("env ant", "cannot read 'env': '=' is missing; write key=value, and quote values with spaces"),
    ("seed=1,2", "seed: 1,2 are several values; add --multirun for a sweep, or write [1,2] for a list"),
    ("ppo.num_envs=${ppo.nope}", "${ppo.nope}: ppo.nope: unknown key; allowed here: num_envs, "),
    ("env=import", "env.name: '???' must have the form package.module:Class when env.source=import"),
    ("env.source=import env.name=a:B", "env.source: import alone keeps the recipe of another environment; write env="),
    ("resume=nowhere", "run: nowhere is not a run folder, it has no config.yaml; runs are in runs/<env>/<time>"),
    ("resume=latest", "there is no run in the folder runs yet; make one with rlstable train, or name a folder"),
    ("env=robot env.task.rewards={slip:{}}", "env.task.rewards: names what the task does not have yet; write +"),
    ("env=fast env.randomize=true", "env.randomize: needs env=playground, and env.randomization_fn=null"),
    ("env=fast env.impl=warp", "env.impl: needs env=playground or env=robot; env.backend chooses the physics of"),
    ("distributed.process_id=2 distributed.num_processes=2",
     "distributed.process_id: 2 must be less than num_processes=2; the first process is 0"),
    ("distributed.enabled=false distributed.coordinator=node1:1",
     "distributed.enabled: false trains in one process, so coordinator, process_id and "),
    ("distributed.coordinator=node1", "distributed.coordinator: 'node1' must have the form <host of process 0>:<port>"),
    ("distributed.enabled=sometimes", "distributed.enabled: input should be 'auto', 'true' or 'false', got "),
    ("hydra/launcher=ray", f"hydra/launcher: ray is not installed; {install('ray').split()[0]}"),
    ("--multirun sweep=ray seed=0,1", f"hydra/launcher: ray is not installed; {install('ray').split()[0]}"),
    ("--multirun sweep=optuna seed=0,1", f"hydra/sweeper: optuna is not installed; {install('optuna').split()[0]}"),
    ("--env ant", "cannot read '--env': write env=ant"),
    ("--lr=1e-3", "cannot read '--lr': write ppo.learning_rate=1e-3"),
    ("--num-envs 8", "cannot read '--num-envs': write ppo.num_envs=8 or eval.num_envs=8"),
    ("--seed", "cannot read '--seed': write seed=<value>"),
    ("--frobnicate", "unknown flag '--frobnicate'; settings are written key=value, and the flags are --multirun"),
    ("--cfg jobs", "--cfg/-c: invalid choice: 'jobs' (choose from "),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistake_is_one_line_with_exit_code_2_and_leaves_no_run(
    words: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = typed(main, *words.split()), capsys.readouterr()
    [line] = printed.err.splitlines()
    assert (code, printed.out) == (2, "") and line.startswith(f"rlstable: {message}")
    assert not any(path.is_file() or path.parent.name == "inverted_pendulum" for path in here.rglob("*"))
