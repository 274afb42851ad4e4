"""Trains a legged robot and plays its exported policies in plain MuJoCo; prints a line of JSON for each seed.

python -m scripts.walk --seeds 3 env.xml=menagerie:unitree_go1 total_steps=1000000

Times are of the whole command, with start, compilation and evaluations. Policies play with the model's own physics: 20
random commands for 10 s each, as they are, with pushes, and with late actions on a slippery floor.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlstable.config import ConfigError
from scripts.process import last_line, run

_LIMIT = 3 * 3600  # seconds of a command
PLAYS = {"plain": "", "pushed": "--push 0.5", "late": "--delay 2 --friction 0.8"}
_STOOD, _ERRORS = re.compile(r"in (\d+) of 20 episodes"), re.compile(r"mean command error (\S+) m/s and (\S+) rad/s")


def read(said: str) -> list[float]:
    """Returns how many of 20 episodes a robot stood to their end, and its mean errors in m/s and rad/s."""
    stood, errors = _STOOD.search(said), _ERRORS.search(said)
    if not stood or not errors:
        raise ConfigError(f"play says nothing of 20 episodes: {last_line(said)}")
    return [int(stood[1]), *map(float, errors.groups())]


def played(policy: Path) -> dict[str, list[float]]:
    command = ("rlstable.play", str(policy), "--commands", "20")
    return {name: read(run(*command, *words.split(), limit=_LIMIT).output) for name, words in PLAYS.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, one after the other [3]")
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="of rlstable train; env.xml is needed")
    asked = parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory() as name:
        for seed in range(asked.seeds):
            own = Path(name, str(seed))
            words = ("env=robot_velocity", *asked.overrides, f"seed={seed}", f"hydra.run.dir={own}")
            training = run("rlstable.train", *words, limit=_LIMIT)
            run("rlstable.export", f"run={own}", "which=latest", "format=onnx", limit=_LIMIT)
            times = {"seconds": round(training.seconds), "core_seconds": round(training.cpu)}
            print(json.dumps({"seed": seed, **times, **played(own / "export" / "policy.onnx")}), flush=True)


if __name__ == "__main__":
    main()
