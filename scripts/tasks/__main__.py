"""Trains every task by its plain command: which return is reached, and does it stay?

python -m scripts.tasks                     # all missing tasks, in docs/tasks.jsonl; resumes where it stopped
python -m scripts.tasks --only brax:hopper  # one task
python -m scripts.tasks --page              # docs/tasks.md and docs/gallery.md from the results
python -m scripts.tasks --films             # docs/gallery from the policies in runs/tasks
python -m scripts.tasks --learn [--short]   # a few tasks, or two, against the thresholds of scripts/tasks/learn.yaml

A run is a process as a user starts it, with all seeds in one program. A change of the recipe makes its rows stale, and
the task is trained again; `--seeds` adds the missing ones. `runs/tasks` keeps the run folder of the median seed of a
process, of whose policy `docs/gallery` has a film. Playground's tasks need its virtual environment, so `make tasks`
uses it for all.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import yaml

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from scripts import process, results, study
from scripts.process import ROOT
from scripts.results import Row
from scripts.study import Cell, Run
from scripts.tasks import learn, page

EVALUATIONS = 20
EPISODES = 512  # of both policies of a seed that seems to have fallen
FOLDER = Path(__file__).parent
RUNS, GALLERY = ROOT / "runs" / "tasks", ROOT / "docs" / "gallery"


@dataclasses.dataclass(frozen=True)
class Task:
    """One task and what is published about it; see `tasks.yaml`."""

    source: str  # brax, playground or robot
    name: str
    record: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)  # published; see tasks.yaml
    trivial: float | None = None  # return of a policy that learned nothing
    env: str | None = None  # ready task of a robot
    model: str | None = None  # model file of a robot, below the repository or an installed package
    more: Sequence[str] = ()  # overrides of a robot beside its plain command
    most: float | None = None  # return of a robot with the greatest rewards from the first to the last step

    @property
    def command(self) -> list[str]:
        """The overrides of the plain command."""
        if self.model is not None:
            return [f"env={self.env}", f"env.xml={_found(self.model)}", *self.more]
        return [f"env={self.name}"] if self.source == "brax" else ["env=playground", f"env.name={self.name}"]


def _found(model: str) -> Path:
    return ROOT / model if (ROOT / model).exists() else Path(str(distribution(model.split("/")[0]).locate_file(model)))


@functools.cache
def tasks() -> dict[str, Task]:
    found = yaml.safe_load((FOLDER / "tasks.yaml").read_text())
    return {
        f"{source}:{name}": Task(source, name, **own) for source, named in found.items() for name, own in named.items()
    }


def recipe(overrides: Sequence[str]) -> str:
    """Returns a digest of everything that the recipe decides."""
    config = compose(list(overrides)).model_dump(mode="json", exclude_none=True)  # a new option may be null
    decided = {name: config[name] for name in ("total_steps", "ppo", "network", "guards", "env")}
    decided["env"].pop("xml", None)  # a path of one machine
    if not decided["env"].get("task", {}).get("physics", True):  # what has no effect decides nothing
        del decided["env"]["task"]["physics"]
    if "teacher" not in decided["ppo"]:
        decided["ppo"] = {key: x for key, x in decided["ppo"].items() if not key.startswith("imitation_")}
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:12]


def train(overrides: Sequence[str], seeds: range, kept: Path | None = None) -> Iterator[Row]:
    """Trains the seeds in one process and yields a row for each; the run folder of the median one goes to `kept`."""
    with study.trained([*overrides, f"eval.num_evals={EVALUATIONS}", "devices=1"], seeds) as (runs, done):
        named = re.search(r"^recipe: (\w+)", done.output, re.MULTILINE)
        times = {"minutes": round(done.seconds / 60, 1), "cpu_minutes": round(done.cpu / 60, 1)}
        about = {"name": named.group(1) if named else "", **times}
        rows = [{"seed": run.seed, **about, **_looked_again(_row(run), run.folder)} for run in runs]
        if not all(row["returns"] for row in rows):
            raise ConfigError("a seed ended before its first evaluation")
        yield from rows
        if kept is not None:
            order = sorted(range(len(rows)), key=lambda index: page.returns_of(rows[index])[-1])
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(runs[order[len(order) // 2]].folder, kept)


def draw(name: str) -> None:
    """Draws the film of a task whose run folder is kept."""
    kept, film = RUNS / _file(name), GALLERY / f"{_file(name)}.webp"
    if kept.exists():
        process.run("scripts.films", str(kept), str(film))


def _file(name: str) -> str:
    return name.replace(":", "_")


def _row(run: Run) -> Row:
    metrics, result = run.metrics, run.result
    valid = [row["training/valid_share"] for row in metrics if "training/valid_share" in row]
    return {
        **run.curve(),
        "handed_over": result["return"],
        "last_again": result.get("fallen_return", result.get("confirmed_last_return")),
        "stop_reason": result["stop_reason"],
        "rollbacks": run.events("rolled_back"),
        "trips": results.trips(metrics[-1]),
        "masked": 1.0 - float(np.mean(valid)) if valid else 0.0,
    }


def _looked_again(row: Row, folder: Path) -> Row:
    """Returns the row; if the last policy seems to have fallen, with returns of both policies in `EPISODES` episodes.

    A run evaluates both policies in as many episodes as an evaluation has, often 50. The mean return of AcrobotSwingup
    then scatters by 10 %. If an evaluation fails, the row keeps the run's returns.
    """
    if not row["returns"] or not page.lost([row]):
        return row
    found = {}
    for name, which in {"handed_over": "best", "last_again": "latest"}.items():
        words = (f"run={folder}", f"episodes={EPISODES}", f"which={which}", "--json")
        try:
            said = process.run("rlstable.evaluate", *words).output
            found[name] = json.loads(said[said.index("{") : said.rindex("}") + 1])["return"]["mean"]["value"]
        except (ConfigError, TypeError) as error:  # the latter if no episode counts
            print(f"tasks: a fall is not confirmed: {error}", file=sys.stderr, flush=True)
            return row
    return {**row, **found}


def stale(rows: Sequence[Row], name: str) -> bool:
    """Returns whether the recipe of a task has changed since its newest training."""
    shown = page.latest(rows, name)
    return bool(shown) and shown[0]["recipe"] != recipe(tasks()[name].command)


def cells(names: Iterable[str], seeds: int) -> Iterator[Cell]:
    for name in names:
        command = tasks()[name].command
        about = {"task": name, "recipe": recipe(command)}
        yield Cell(name, about, range(seeds), functools.partial(_train_and_draw, name, command))


def _train_and_draw(name: str, command: Sequence[str], seeds: range) -> Iterator[Row]:
    yield from train(command, seeds, RUNS / _file(name))
    draw(name)


def write_pages(rows: Sequence[Row], out: Path) -> None:
    page.write(rows, tasks(), out.with_suffix(".md"), [name for name in tasks() if stale(rows, name)])
    write_gallery(rows, out)


def write_gallery(rows: Sequence[Row], out: Path) -> None:
    films = {name: f"gallery/{_file(name)}.webp" for name in tasks() if (GALLERY / f"{_file(name)}.webp").exists()}
    page.write_gallery(rows, films, out.with_name("gallery.md"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = results.study_parser(__doc__, Path("docs/tasks.jsonl"), 5, only=tasks())
    parser.add_argument("--films", action="store_true", help="draw docs/gallery again, and train nothing")
    parser.add_argument("--learn", action="store_true", help="train the tasks of learn.yaml, into docs/learn.jsonl")
    parser.add_argument("--short", action="store_true", help="with --learn: only the quick tasks")
    asked = parser.parse_args(argv)
    if asked.learn:
        sys.exit(learn.main(asked.short, train, results.provenance(), asked.out.with_name("learn.jsonl")))
    if importlib.util.find_spec("mujoco_playground") is None:
        sys.exit("tasks: needs MuJoCo Playground for the marks of its page; use make tasks")
    names = asked.only or tasks()
    for name in names if asked.films else ():
        draw(name)
    study.run(asked, () if asked.films else cells(names, asked.seeds), write_pages)


if __name__ == "__main__":
    main()
