"""Times the host's part of an iteration: iterations of a run whose training program computes nothing."""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rlstable.cli.compose import compose
from scripts.arguments import add_choice, whole
from scripts.bench.parts import Parts
from scripts.bench.side import QUIET
from scripts.pages import Section
from scripts.results import Row
from scripts.sittings import Sitting

NAME, HELP = "host", "the host's part of an iteration"
# The number of arrays in the training state decides the time, and few environments fill memory as fast as many.
_SMALL = ("ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=2", "env.reset_pool_size=8")
TASKS = {
    "fast": ("env=fast", *_SMALL),
    "inverted_pendulum": ("env=inverted_pendulum", "env.backend=mjx", *_SMALL),
    "humanoid": ("env=humanoid", "env.backend=mjx", *_SMALL),
}
COMMON = ("devices=1", "compile_cache=null")
PARTS = {task: (*own, *COMMON) for task, own in TASKS.items()}
WARM_UP = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, "--task", TASKS)
    parser.add_argument("--iterations", type=whole(2), default=1000, help="timed iterations; default: 1000")


def parts(args: argparse.Namespace, console: Console) -> Parts:
    def measure(task: str, sitting: Sitting) -> list[Row]:
        del sitting  # a part takes seconds
        with console.status(f"{task}: tracing and timing"):
            return [run(task, args.iterations)]

    return Parts(NAME, PARTS, args.task or [*TASKS], {"iterations": args.iterations}, measure, section)


def run(task: str, iterations: int) -> Row:
    import jax

    from rlstable.runner.loop import TrainingLoop

    with tempfile.TemporaryDirectory() as folder:
        loop = TrainingLoop(compose([*PARTS[task], *QUIET]), Path(folder) / "run")
        try:
            use_empty_program(loop)
            _times(loop.advance, WARM_UP)
            iteration = _times(loop.advance, iterations)
            call = _times(lambda: _call(loop), iterations)
            arrays = len(jax.tree.leaves(loop.single.state))
        finally:
            loop.close()
    return {"task": task, "arrays": arrays, "iterations": iterations, "iteration": iteration, "call": call}


def use_empty_program(loop: Any) -> None:
    """Makes a run call a program that returns the training state and healthy metrics, and counts the iteration."""
    import jax
    import jax.numpy as jnp

    from rlstable.device import sharding
    from rlstable.ppo.state import SPECS
    from rlstable.runner.setup import Program

    training, config = loop.single, loop.config
    setup, mesh = training.programs.setup, training.programs.mesh
    iteration = sharding.over_devices(setup.ppo.iteration, mesh, (SPECS,), (SPECS, sharding.REPLICATED))
    _, shapes = jax.eval_shape(iteration, training.state)

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    def empty(states: tuple[Any, ...]) -> Any:
        (state,) = states
        metrics = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
        trips = zeros(shapes.trips)
        counters = state.counters.after(config.env_steps_per_iteration, jnp.int32(1), jnp.int32(0), trips)
        metrics = metrics._replace(trips=trips, counters=counters, exhausted=zeros(shapes.exhausted))
        return ((dataclasses.replace(state, counters=counters), metrics),)

    program = sharding.over_devices(empty, mesh, ((SPECS,),), ((SPECS, sharding.REPLICATED),), donate=(0,))
    executable = program.lower((training.state,)).compile()
    loop._slots._programs[training.programs.key] = Program(executable, setup.precision)


def _call(loop: Any) -> None:
    """Calls the program and fetches its metrics, and does nothing else."""
    from rlstable.device.sharding import fetch

    program = loop._slots.program(loop.seeds, loop.seeds)
    fetch(loop._slots.store(program.each(loop._slots.states(loop.seeds)), loop.seeds))


def _times(function: Callable[[], Any], count: int) -> dict[str, list[float]]:
    """Milliseconds of calls, of the clock and of the thread on a processor: 10th percentile, median, 90th."""
    wall, processor = np.empty(count), np.empty(count)
    for index in range(count):
        clock, own = time.perf_counter(), time.thread_time()
        function()
        wall[index], processor[index] = time.perf_counter() - clock, time.thread_time() - own
    named = {"wall": wall, "processor": processor}
    return {name: (1e3 * np.percentile(seconds, (10, 50, 90))).round(4).tolist() for name, seconds in named.items()}


def section(rows: list[Row]) -> Section:
    header = ("task", "arrays in\nthe state", "iteration,\nms", "from", "to", "processor,\nms", "call and\nfetch, ms")
    cells, notes = [], []
    for row in rows:
        low, median, high = row["iteration"]["wall"]
        numbers = (median, low, high, row["iteration"]["processor"][1], row["call"]["processor"][1])
        cells.append((row["task"], str(row["arrays"]), *(f"{number:.2f}" for number in numbers)))
        notes.append(f"{row['task']}: `{' '.join(PARTS[row['task']])}`, {row['iterations']:,} iterations")
    return Section(NAME, "The host's part of an iteration", header, cells, notes, rows)
