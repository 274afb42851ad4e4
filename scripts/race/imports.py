"""Imports what a run imports, makes its environment, and prints the time and the memory then.

python -m scripts.race.imports env=ant env.backend=native
"""

import json
import sys
import time

import rlstable.runner.loop
import rlstable.train  # noqa: F401
from rlstable.cli.compose import compose
from rlstable.envs.load import load_env
from scripts.process import memory_mb

load_env(compose(sys.argv[1:]).env)
print(json.dumps({"time": time.time(), "imported_mb": memory_mb("self", "VmRSS")}))
