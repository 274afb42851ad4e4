"""The README's moving pictures: the packed policies, and one fault with and without guards."""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

from rlstable.demo.__main__ import unpacked
from rlstable.io.run_folder import located
from scripts import films, study

FILMED = {"quadruped": 10.0, "humanoid": 5.0}  # seconds
SIZE, EVERY = (400, 300), 2  # pixels, and the share of a film's 30 frames per second
FAULT = [
    "env=inverted_pendulum", "fault.site=physics", "fault.start=10", "total_steps=61440", "eval.num_evals=16",
    "eval.num_envs=16", "eval.target_return=null", "logging=quiet", "checkpoint=off",
]  # fmt: skip
SIDES = {"guards=off": ["guards=off", "supervise=off"], "guards=default": ["guards=default"]}
COLOURS = {"guards=off": "tab:red", "guards=default": "tab:green"}
_FRAMES, _LAST = 40, 20  # of the curves, and repetitions of the last frame


def curve(words: Sequence[str]) -> list[tuple[int, float | None]]:
    """The evaluations of a training: steps, and the return, None for NaN."""
    with study.trained([*FAULT, *words], range(1)) as ((run,), _):  # NaN ends the one without guards
        return list(zip(*run.curve().values(), strict=True))


def of_fault(path: Path) -> None:
    curves = {name: curve(words) for name, words in SIDES.items()}
    last = max(step for found in curves.values() for step, _ in found)
    frames = []
    for n in [*range(_FRAMES + 1), *[_FRAMES] * _LAST]:
        figure, axis = plt.subplots(figsize=(4, 3), dpi=80, constrained_layout=True)
        for name, found in curves.items():
            seen = [(step, value) for step, value in found if step <= n / _FRAMES * last]
            sound, void = ([p for p in seen if (p[1] is None) is empty] for empty in (False, True))
            axis.plot([s for s, _ in sound], [r for _, r in sound], color=COLOURS[name], label=name, lw=2)
            axis.plot([step for step, _ in void], [0.0] * len(void), "x", color=COLOURS[name])
            if void:
                axis.annotate("NaN", (void[-1][0], 30), color=COLOURS[name], ha="right")
        axis.set(xlim=(0, last * 1.02), ylim=(-40, 1080), xlabel="environment steps", ylabel="return")
        axis.set_title("1 simulation in 1,000 explodes from step 20,000", fontsize="small")
        axis.legend(loc="center right", frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        plt.close(figure)
        frames.append(Image.open(buffer).convert("RGB"))
    films.save(frames, path, 100)


def draw(folder: Path) -> None:
    for name, seconds in FILMED.items():
        drawn = films.frames(unpacked(located(f"demo:{name}")), seconds, SIZE, EVERY)
        films.save(drawn, folder / f"{name}.webp", round(1000 * EVERY / 30))
    of_fault(folder / "fault.webp")
