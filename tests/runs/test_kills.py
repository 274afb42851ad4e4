"""Runs that are killed at any moment and resumed end in the same bits as an uninterrupted run."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from deadly import Moment, start
from running import ITERATION
from saved import events, require_same, rows

from rlstable.io.run_folder import seed_folders

pytestmark = pytest.mark.slow
TOTAL = f"total_steps={60 * ITERATION}"
# Two rollbacks: a storm of seven iterations, with a patience of three.
STORM = [
    "fault.site=reward", "fault.probability=1.0", "fault.start=6", "fault.iterations=7", "guards.storm.patience=3",
    "supervise.recovery.every=3", "supervise.recovery.relax_after=5",
]  # fmt: skip
# Settings of the runs that are killed five times each.
CHAINS: dict[str, list[str]] = {
    "healthy": ["devices=1"],
    "two rollbacks, two devices": ["devices=2", *STORM],
    "little is kept": ["devices=1", *STORM, "checkpoint.keep=1", "checkpoint.keep_best=0", "checkpoint.every=3"],
    "in the foreground": ["devices=1", *STORM, "checkpoint.asynchronous=false", "env.reset=pool"],
    "three seeds": ["devices=1", "seeds=3", *STORM, "fault.seed=1", "supervise.ladder.enabled=false"],
}
KILLS = 5


def ends(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (0, 75, -9), output
    return process.returncode


def kill(run_dir: Path, args: Sequence[str], moments: Sequence[Moment]) -> None:
    """Starts the run once per moment and kills it, then once more to its end."""
    for moment in moments:
        assert ends(start(run_dir, args, moment)) == -9, f"the run ended before {moment}"
    assert ends(start(run_dir, args)) == 0


def resumed_at(run_dir: Path) -> list[int]:
    """Iterations at which the run was resumed, without starts that found no checkpoint."""
    return [event["iteration"] for event in events(run_dir, "resumed")]


def moments(seed: int, storm: bool) -> list[Moment]:
    """Five random moments that every run reaches; the first comes after a save."""
    draw = random.Random(seed)

    def saving() -> Moment:
        return {"at": "write", "n": draw.randint(2, 5), "step": draw.randint(1, 45)}

    def rolling_back() -> Moment:
        return {"at": "rollback", "n": 1, "step": draw.choice([0, draw.randint(1, 45)])}

    def other() -> Moment:
        compiled = draw.choice([("training", 0.8), ("evaluation", 0.1)])
        return draw.choice([
            {"at": "iteration", "n": draw.randint(1, 10)},
            {"at": "evaluation", "n": draw.randint(1, 2)},
            {"at": "compile", "what": compiled[0], "seconds": round(draw.uniform(0.0, compiled[1]), 3)},
            saving(),
        ])  # fmt: skip

    first = [rolling_back(), rolling_back()] if storm else [saving(), {"at": "evaluation", "n": 1}]
    return first + [other() for _ in range(KILLS - 2)]


@pytest.mark.parametrize(("seed", "chain"), list(enumerate(CHAINS)), ids=list(CHAINS))
def test_run_killed_five_times_at_random_ends_in_the_same_bits(tmp_path: Path, seed: int, chain: str) -> None:
    """Some of several seeds have saved and some have not. The seeds behind catch up."""
    args, killed = [*CHAINS[chain], TOTAL], tmp_path / "killed"
    whole = start(tmp_path / "whole", args)
    planned = moments(seed, storm="fault.site=reward" in args)
    kill(killed, args, planned)
    assert ends(whole) == 0
    if "seeds=3" in args:
        assert [row["step"] for row in rows(killed)] == [row["step"] for row in rows(tmp_path / "whole")]
        folders = list(zip(*map(seed_folders, (killed, tmp_path / "whole")), strict=True))
        assert len(folders) == 3
    else:
        folders = [(killed, tmp_path / "whole")]
        at = resumed_at(killed)
        print(f"{chain}: resumed at {at} after {planned}")
        # Of five kills, at least four came after a save.
        assert len(at) >= KILLS - 1 and min(at) > 0
    for ours, theirs in folders:
        assert resumed_at(ours)
        require_same(ours, theirs)
