"""Imports what a run of ours imports, makes its environment, and says when that was done and in how much memory.

python -m scripts.race.imports env=ant env.backend=native
"""

import json
import sys
import time

import rlstable.runner.runner

import rlstable.train  # noqa: F401
from rlstable.cli.compose import compose
from rlstable.envs.load import load_env
from scripts.race import process as race_process

load_env(compose(sys.argv[1:]).env)
print(json.dumps({"time": time.time(), "imported_mb": race_process.memory_mb("self", "VmRSS")}))
