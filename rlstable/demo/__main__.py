"""The command `rlstable demo`: shows policies that come with the package, without training.

A page shows a recorded episode, so that it opens at once: nothing compiles, and JAX is not imported. Exit code 0 means
that a page was written or the viewer was closed, 2 means a user error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np

from rlstable.cli import command
from rlstable.config import ConfigError
from rlstable.io.files import require_replaceable, write_atomically
from rlstable.io.run_folder import demos, located
from rlstable.render.episode import RecordedEpisodes, Recording
from rlstable.render.page import page

if TYPE_CHECKING:
    from rlstable.policy.saved_run import SavedRun

_EPILOG = """
examples:
  rlstable demo                        pages of all policies, in runs/demo
  rlstable demo humanoid               a page of one
  rlstable demo quadruped --viewer     MuJoCo's viewer; arrow keys, comma and full stop change the velocity command

In Python: rlstable.load_policy("demo:humanoid").
"""
EPISODE, WORDS = "episode.npz", "overrides.json"  # a recorded episode, and the overrides of the training
_VIEWED = "600"  # seconds


def main(argv: Sequence[str] | None = None) -> None:
    known = demos()
    parser = command.parser("demo", "Shows trained policies that come with the package.", _EPILOG)
    parser.add_argument("names", nargs="*", metavar="name", help=f"{', '.join(known)} [all]")
    parser.add_argument("--viewer", action="store_true", help="MuJoCo's viewer instead of a page; for quadruped")
    parser.add_argument("--out", type=Path, default=Path("runs", "demo"), help="folder of the pages [runs/demo]")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"there is no policy {unknown[0]}; there are {', '.join(known)}")
    if args.viewer:
        return view(args.names or ["quadruped"], args.out)
    with command.working():
        written = draw(args.names or known, args.out)
    if args.json:
        return command.print_json(written)
    for one in written:
        trained = f"rlstable train {' '.join(one['trained'])}"
        print(f"{one['file']}: return {one['return']:,.1f}, trained by {trained}")
    # Without a display, `webbrowser` would start a browser for text in this terminal.
    if sys.stdout.isatty() and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        webbrowser.open(Path(written[0]["file"]).absolute().as_uri())


def draw(names: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """Writes a page of each policy, and returns its `file`, the `return` and the overrides of its training."""
    addresses = {name: f"{name}.html" for name in names}
    require_replaceable(out, addresses.values(), "--out")
    out.mkdir(parents=True, exist_ok=True)
    written: list[dict[str, Any]] = []
    for name, address in addresses.items():
        recorded, folder = unpacked(located(f"demo:{name}")), located(f"demo:{name}")
        others = {other: where for other, where in addresses.items() if other != name}
        write_atomically(out / address, page(recorded, others))
        total, words = round(recorded.recordings[0].total, 1), json.loads((folder / WORDS).read_text())
        written.append({"file": str(out / address), "return": total, "trained": words})
    return written


def view(names: Sequence[str], out: Path) -> None:
    """Exports the policy of a robot, and plays it in MuJoCo's viewer until the user closes it."""
    from rlstable import play
    from rlstable.export.formats import write_onnx, write_player
    from rlstable.export.function import policy_function

    with command.working():
        function, folder = policy_function(open_demo(names[0])), out / names[0]
        if function.robot is None or len(names) > 1:
            raise ConfigError("--viewer: is for quadruped, which follows commands; the others have pages")
        require_replaceable(folder, ("policy.onnx", "robot.mjb", "play.py"), "--out")
        folder.mkdir(parents=True, exist_ok=True)
        write_onnx(function, folder / "policy.onnx")
        write_player(function.robot, folder)
    print("arrow keys: forward and turn; comma and full stop: sideways")
    play.main([str(folder / "policy.onnx"), "--viewer", "--seconds", _VIEWED])


def open_demo(name: str) -> SavedRun:
    """A policy of the package, with the configuration that its overrides have in this version."""
    from rlstable.cli.compose import compose
    from rlstable.compilation.xla import check_flags, disable_async_dispatch
    from rlstable.policy.policy import load_policy
    from rlstable.policy.saved_run import SavedRun

    check_flags()
    disable_async_dispatch()  # before the policy's arrays exist
    folder = located(f"demo:{name}")
    words = [word.replace("env.xml=", f"env.xml={folder}/") for word in json.loads((folder / WORDS).read_text())]
    policy = load_policy(folder)
    return SavedRun(folder, compose(words), policy)


def packed(recorded: RecordedEpisodes, model: str, folder: Path) -> None:
    """Writes the first recorded episode; `model` is a file of the folder, or `brax:<file>` of Brax's assets."""
    one, none = recorded.recordings[0], np.zeros(0)
    np.savez_compressed(
        folder / EPISODE, title=recorded.title, seconds=recorded.seconds, model=model,
        positions=one.positions.astype(np.float32), rewards=one.rewards.astype(np.float32),
        motion=none if one.motion is None else one.motion.astype(np.float32),
    )  # fmt: skip


def unpacked(folder: Path) -> RecordedEpisodes:
    with np.load(folder / EPISODE) as saved:
        arrays = dict(saved)
    source, _, file = str(arrays["model"]).rpartition(":")
    if source:
        spec = importlib.util.find_spec(source)  # does not import Brax
        assert spec is not None and spec.submodule_search_locations
        folder = Path(spec.submodule_search_locations[0], "envs", "assets")
    mujoco.set_mju_user_warning(lambda _: None)  # about Brax's models; MuJoCo would also write a file
    model = mujoco.MjModel.from_xml_path(str(folder / file))
    motion = arrays["motion"] if arrays["motion"].size else None
    recording = Recording("episode", arrays["positions"], arrays["rewards"], False, motion)
    return RecordedEpisodes(str(arrays["title"]), model, float(arrays["seconds"]), (recording,))


if __name__ == "__main__":
    main()
