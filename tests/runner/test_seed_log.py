"""The log of a seed says when evaluation takes much of the time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toys import tiny_config

from rlstable.io.console import Console
from rlstable.runner.host_state import HostState
from rlstable.runner.live_page import LivePage
from rlstable.runner.seed_log import SeedLog


@pytest.mark.parametrize(
    ("training", "evaluations", "said"), [(60.0, (15.0, 20.0), 1), (120.0, (15.0, 20.0), 0), (1.0, (9.0, 9.0), 0)]
)
def test_evaluation_beyond_a_quarter_of_the_time_is_said_once(
    tmp_path: Path, training: float, evaluations: tuple[float, ...], said: int
) -> None:
    host = HostState()
    config, page = tiny_config(eval={"num_evals": 5, "num_envs": 64}), LivePage(tmp_path, bool)
    log = SeedLog(config, tmp_path, None, Console("off", 1), host, page)
    host.elapsed = training
    for seconds in (*evaluations, 1.0):
        log.evaluation({"eval/epoch_eval_time": seconds, "eval/episode_reward": 1.0, "eval/aborted_share": 0.0})
    log.logbook.start(None, None)
    log.logbook.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    slow = [event for event in events if event["kind"] == "evaluation_slow"]
    assert len(slow) == said
    if said:
        assert (slow[0]["share"], slow[0]["remedy"]) == (0.37, "lower eval.num_envs=64 or eval.num_evals=5")
