"""The notebooks run from top to bottom and contain no saved output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import needs_opengl

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def executed(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the notebook in a new kernel and returns it with its outputs."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("RLSTABLE_RUNS", str(runs))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    return NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(runs)}}).execute()


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def kinds(notebook: Any) -> set[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return {kind for output in outputs for kind in output.get("data", {})}


@pytest.mark.parametrize("name", NAMES)
def test_notebook_has_no_saved_output(name: str) -> None:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_quickstart_notebook_trains_evaluates_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = executed("quickstart", tmp_path, monkeypatch)
    run = tmp_path / "quickstart" / "inverted_pendulum"
    said = printed(notebook)
    assert "target_reached after" in said and "guard trips: none" in said
    assert {"image/png", "text/html"} <= kinds(notebook)  # the curve, the page to watch
    assert "95 % interval" in said
    assert (run / "report.html").is_file()
    assert driven(run / "export") == pytest.approx(1000.0, rel=0.05)


def driven(folder: Path) -> float:
    """Return of the exported policy in the example of docs/export.md, which imports neither rlstable nor JAX."""
    blocks = re.findall(r"```python\n(import mujoco.*?)```", (FOLDER.parent / "docs" / "export.md").read_text(), re.S)
    (example,) = [block for block in blocks if "inverted_pendulum" in block]
    assert "rlstable" not in example and "jax" not in example
    (folder / "drive.py").write_text(example)
    done = subprocess.run([sys.executable, "drive.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.slow
def test_break_and_guard_notebook_survives_every_fault_with_guards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = printed(executed("break_and_guard", tmp_path, monkeypatch))
    guarded = [line for line in said.splitlines() if "guards=default" in line]
    assert len(guarded) == 5
    for line in guarded:
        assert "completed" in line and float(line.split("return")[1].split()[0]) > 900, said
    plain = [line for line in said.splitlines() if "guards=off" in line]
    # Without guards at least the faults of the gradient and the optimizer ruin the training.
    assert sum("return None" in line or float(line.split("return")[1].split()[0]) < 500 for line in plain) >= 2, said


@pytest.mark.slow
@needs_opengl
def test_notebook_of_a_robot_goes_from_the_model_to_the_film(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = executed("your_robot", tmp_path, monkeypatch)
    run, said = tmp_path / "your_robot" / "robot_reach", printed(notebook)
    assert "robot_reach: ready" in said and "completed after 6" in said
    assert float(said.split("; return ")[1].split()[0]) > 2  # of 4; an arm at rest returns about 0.9
    assert f"film {run / 'film.mp4'}" in said and (run / "film.mp4").stat().st_size > 10_000
    assert "video/mp4" in kinds(notebook) or "text/html" in kinds(notebook)
