"""Which optimizer survives which gradient, and what does it cost? Fills the tables of docs/guards_in_your_trainer.md.

make guarded                                # a quarter of an hour on a CPU; also trains rejax's PPO with the guards
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

from rlstable.guards import guarded
from scripts import pages, results
from scripts.process import ROOT, python_of

STEPS, RATE, PAIRS = 600, 1e-2, 30
FAULTS = {  # factor of the gradient, and the steps
    "NaN once": (np.nan, [200]),
    "infinity once": (np.inf, [200]),
    "1e21 times, once": (1e21, [200]),
    "a million times, 1 in 100": (1e6, range(100, STEPS - 100, 100)),
    "100 NaN in a row": (np.nan, range(200, 300)),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "optax.adam": lambda: optax.adam(RATE),
    "clip_by_global_norm, adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)),
    "apply_if_finite(adam, 5)": lambda: optax.apply_if_finite(optax.adam(RATE), 5),
    "MultiSteps(adam, 1, skip_not_finite)": lambda: optax.MultiSteps(optax.adam(RATE), 1, True, optax.skip_not_finite),
    "flax DynamicScale, adam": lambda: optax.adam(RATE),
    "guarded(adam)": lambda: guarded(optax.adam(RATE)),
}


def learned(name: str, factor: float, at: Sequence[int]) -> str:
    """The end of a regression with bad gradients: how it ended, as a word."""
    optimizer, scaled = OPTIMIZERS[name](), "Dynamic" in name
    hit = np.ones(STEPS, np.float32)
    hit[list(at)] = factor
    keys = jax.random.split(jax.random.PRNGKey(0), STEPS)

    def step(carry: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        params, state, scale = carry
        x = jax.random.normal(now[1], (8, 32))
        loss = lambda w: jnp.mean((w @ x - x.sum(axis=0)) ** 2)  # noqa: E731
        if scaled:
            scale, _, _, gradient = scale.value_and_grad(lambda w: now[0] * loss(w))(params)
            fine = jnp.isfinite(gradient).all()
        else:
            gradient, fine = now[0] * jax.grad(loss)(params), True
        updates, new = optimizer.update(gradient, state, params)
        changed = optax.apply_updates(params, updates), new
        kept = jax.tree.map(lambda n, o: jnp.where(fine, n, o), changed, (params, state))
        return (*kept, scale), None

    params = jnp.zeros(8)
    first = params, optimizer.init(params), DynamicScale(scale=1.0)
    (params, *_), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, (jnp.asarray(hit), keys)))(first)
    error = float(jnp.abs(params - 1).max())
    return "**NaN**" if np.isnan(error) else "learns" if error < 0.05 else f"**error {error:.2g}**"


def seconds(name: str, width: int) -> Callable[[], float]:
    """A function that takes 20 updates of an MLP's parameters and returns the seconds of one."""
    optimizer = OPTIMIZERS[name]()
    params = {f"layer{i}": jnp.ones((width, width)) for i in range(4)}
    gradient, state = jax.tree.map(lambda x: 0.01 * x, params), optimizer.init(params)
    update = jax.jit(lambda p, s: optimizer.update(gradient, s, p))
    jax.block_until_ready(update(params, state))

    def taken() -> float:
        start = time.perf_counter()
        for _ in range(20):
            result = update(params, state)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / 20

    return taken


def cost(name: str, width: int) -> str:
    if "Dynamic" in name:
        return ""  # it scales a loss, and is no optimizer
    plain, own = seconds("optax.adam", width), seconds(name, width)
    pairs = [(own(), plain()) for _ in range(PAIRS)]
    extra = statistics.median(a - b for a, b in pairs)
    return f"{1e6 * extra:+,.0f} of {1e6 * statistics.median(b for _, b in pairs):,.0f}"


def in_rejax() -> str:
    """The table of rejax's PPO with a fault, from its own environment."""
    command = [str(python_of("rejax")), str(Path(__file__).with_name("rejax_ppo.py"))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    shown = [[one["side"], ", ".join("**NaN**" if x is None else f"{x:,.1f}" for x in one["returns"])] for one in found]
    return "\n".join(pages.table(("side", "last return of each seed"), shown))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "guards_in_your_trainer.md")
    asked = parser.parse_args(argv)
    rows = []
    for name in OPTIMIZERS:
        survived = [learned(name, factor, list(at)) for factor, at in FAULTS.values()]
        rows.append([f"`{name}`", *survived, "" if name == "optax.adam" else cost(name, 180)])
        print(*rows[-1], flush=True)
    table = pages.table(("optimizer", *FAULTS, "microseconds more, of adam's"), rows)
    versions = ", ".join(f"{name} {version}" for name, version in results.versions().items())
    machine = f"{versions}, on {jax.devices()[0].device_kind}."
    pages.fill(asked.page, {"survivors": "\n".join([*table, "", machine]), "rejax": in_rejax()})


if __name__ == "__main__":
    main()
