"""The command `python -m rlstable.export run=runs/...`: writes a policy as files that need no rlstable.

Exit code 0 means that the files were written and agree with the policy, 2 means a user error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rlstable.cli import command
from rlstable.cli.options import OutFolder, PolicyOptions
from rlstable.config.schema import Flag

_EPILOG = """
examples:
  python -m rlstable.export                             the newest run in runs
  python -m rlstable.export run=runs/ant/2026-01-31_22-00-00
  python -m rlstable.export run=runs/ant/2026-01-31_22-00-00 which=latest format=onnx out=robot
"""


class ExportOptions(PolicyOptions):
    """Arguments of the command: the policy, the formats, and the folder to write to."""

    format: Literal["both", "onnx", "stablehlo"] = Field(
        "both", description="both; onnx, for robots and other languages; stablehlo, for jax and XLA"
    )
    out: OutFolder | None = Field(None, description="folder to write to, null for <run>/export")
    trust: Flag = Field(
        False, description="true to import the terms of a robot that another user's run folder names; read them first"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.key_parser("export", "Writes a policy as files that need no rlstable.", ExportOptions, _EPILOG)
    args = parser.parse_intermixed_args(argv)
    with command.working():
        written = write(command.options(ExportOptions, args.words))
    if args.json:
        command.print_json(written)
    else:
        for entry in written:
            differs = f", actions differ by {entry['difference']:.1e} at most" if "difference" in entry else ""
            print(f"{entry['file']}: {entry['bytes']:,} bytes{differs}")


def write(options: ExportOptions) -> list[dict[str, Any]]:
    """Writes the policy, and for a robot also its model and a program that plays the policy.

    Returns per file its path (`file`) and size (`bytes`), and of a policy its `difference` from the trained one.
    """
    from rlstable.export.formats import write_onnx, write_player, write_stablehlo
    from rlstable.export.function import policy_function
    from rlstable.io.files import require_replaceable, subfolder
    from rlstable.policy.saved_run import open_run

    run = open_run(options.run, options.which, options.trust)
    command.note(f"exporting the policy of the {run.checkpoint}")
    function = policy_function(run)
    written = []
    folder = options.out or subfolder(options.run, "export")
    require_replaceable(folder, ("policy.onnx", "policy.stablehlo", "policy.json", "robot.mjb", "play.py"), "out")
    folder.mkdir(parents=True, exist_ok=True)
    if options.format in ("both", "stablehlo"):
        written.append(write_stablehlo(function, folder / "policy.stablehlo"))
    if options.format in ("both", "onnx"):
        written.append(write_onnx(function, folder / "policy.onnx"))
    entries: list[dict[str, Any]] = [{"file": str(one.path), "difference": one.difference} for one in written]
    if function.robot is not None:
        entries += [{"file": str(path)} for path in write_player(function.robot, folder)]
    return [{**entry, "bytes": Path(entry["file"]).stat().st_size} for entry in entries]


if __name__ == "__main__":
    main()
