"""Destinations of metrics and events: JSON lines always, TensorBoard and Weights & Biases by choice.

Every sink has the same three methods and may raise. `Sinks` fans out to many sinks and catches their errors: training
continues whatever breaks in a sink.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlstable.config import ConfigError
from rlstable.config.run import WandbConfig
from rlstable.io.jsonl import JsonLines, to_json

__all__ = ["JsonLines", "Metrics", "Sink", "Sinks", "TensorBoard", "Wandb"]

Metrics = Mapping[str, float | int | None]
OnEvent = Callable[[str, dict[str, Any]], None]
_PATIENCE = 3  # failures in a row after which a sink is left alone


class Sink(Protocol):
    """A receiver of metrics and events."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of one logging interval; None is a metric that has no value now."""

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Takes one thing that happened."""

    def close(self) -> None:
        """Writes out what is left; nothing is logged afterwards."""


class Sinks:
    """Many sinks as one; no error of a sink reaches the caller.

    A sink that raises is reported once, as the event `sink_failed` to the others, or as a warning where none
    of them takes it. After three failures in a row it is closed and dropped, as the event `sink_dropped`; but for
    `JsonLines`, which is the record of the run, and whose full disk may have room again: that is the event
    `sink_recovered` with the number of lines `lost`.

    Args:
        sinks: The receivers.
        tell: Receives these three events too, as a sink would, and returns whether an output took them.
    """

    def __init__(self, sinks: Iterable[Sink], tell: Callable[[int, str, Mapping[str, Any]], bool] | None = None):
        self._sinks = list(sinks)
        self._tell = tell
        self._failures = dict.fromkeys(map(id, self._sinks), 0)
        self._reported: set[int] = set()

    def log(self, step: int, metrics: Metrics) -> None:
        """Passes metrics to every sink."""
        for sink in list(self._sinks):
            self._try(sink, step, lambda sink=sink: sink.log(step, metrics))  # type: ignore[misc]

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> bool:
        """Passes an event to every sink; whether any took it."""
        return any(
            [
                self._try(sink, step, lambda sink=sink: sink.event(step, kind, fields))  # type: ignore[misc]
                for sink in list(self._sinks)
            ]
        )

    def close(self) -> None:
        """Closes every sink; may be called again."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:
                _warn(f"{type(sink).__name__} could not be closed: {_one_line(error)}")

    def _try(self, sink: Sink, step: int, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self._failures[id(sink)] += 1
            fields = {"sink": type(sink).__name__, "error": _one_line(error)}
            if id(sink) not in self._reported:
                self._reported.add(id(sink))
                self._report(sink, step, "sink_failed", fields)
            patient = isinstance(sink, JsonLines)
            if self._failures[id(sink)] >= _PATIENCE and sink in self._sinks and not patient:
                self._sinks.remove(sink)
                self._report(sink, step, "sink_dropped", fields)
                with contextlib.suppress(Exception):  # it is broken, which has just been said
                    sink.close()
            return False
        else:
            lost, self._failures[id(sink)] = self._failures[id(sink)], 0
            if lost >= _PATIENCE:
                self._reported.discard(id(sink))  # the next time is news
                news: dict[str, Any] = {"sink": type(sink).__name__, "lost": lost}
                self.event(step, "sink_recovered", news)
                if self._tell is not None:
                    self._tell(step, "sink_recovered", news)
            return True

    def _report(self, broken: Sink, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        heard = self._tell is not None and self._tell(step, kind, fields)
        for sink in self._sinks:
            if sink is not broken:
                try:
                    sink.event(step, kind, fields)
                    heard = True
                except Exception:
                    continue  # its own turn to be reported comes with its own next call
        if not heard:
            _warn(f"{kind}: {fields['sink']}: {fields['error']}")


class TensorBoard:
    """Scalars and events in `<run>/tensorboard`.

    Args:
        run_dir: Folder of the run.
        resume_step: As of `JsonLines`; later steps are hidden by TensorBoard.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "logging.tensorboard: needs the package tensorboardX; pip install rlstable[tensorboard], "
                "or set logging.tensorboard=false"
            ) from error
        purge = None if resume_step is None else int(resume_step) + 1
        self._open = functools.partial(SummaryWriter, str(Path(run_dir) / "tensorboard"), flush_secs=10)
        self._writer = self._open(purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics that have a finite value."""
        for key, value in _finite(metrics).items():
            self._writer.add_scalar(key, value, int(step))

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Writes an event as text under `events/<kind>`."""
        self._writer.add_text(f"events/{kind}", json.dumps(to_json(fields)), int(step))

    def restore(self) -> None:
        """Begins a new file, where the folder of the present one is gone."""
        self._writer.close()
        self._writer = self._open()

    def close(self) -> None:
        """Writes out what is left; may be called again."""
        self._writer.close()


class Wandb:
    """Weights & Biases. A failed start is the event `wandb_failed`, and the sink then does nothing.

    A step smaller than one logged before, as after a rollback, is logged at that one: W&B would drop it. Events count
    up under `events/<kind>`.

    Args:
        config: Project and so on; with mode=disabled the sink does nothing.
        run_dir: The run folder, in which `wandb/` is made.
        run_config: The run's configuration, for W&B's own page.
        run_id: Id of the run to continue; None for a new one.
        on_event: Called as `on_event(kind, fields)` if the start fails.
        timeout: Most seconds for the start, and for the end.

    Attributes:
        run_id: Id to pass for a resume; None if there is no run.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_dir: str | Path,
        run_config: Mapping[str, Any],
        run_id: str | None = None,
        on_event: OnEvent | None = None,
        timeout: float = 60.0,
    ):
        self.run_id = run_id
        self._run: Any = None
        self._last_step = 0
        self._counts: dict[str, int] = {}
        if config.mode == "disabled":
            return
        try:
            self._run = _start_wandb(config, Path(run_dir), run_config, run_id, timeout)
            self.run_id = str(self._run.id)
            self._last_step = int(self._run.step or 0)
        except Exception as error:
            if on_event is not None:
                on_event("wandb_failed", {"at": "start", "error": _one_line(error)})

    def log(self, step: int, metrics: Metrics) -> None:
        """Sends the metrics that have a value."""
        self._send(step, {key: value for key, value in metrics.items() if value is not None})

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Counts the event, as the metric `events/<kind>`."""
        del fields
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._send(step, {f"events/{kind}": self._counts[kind]})

    def close(self) -> None:
        """Ends the W&B run; may be called again."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _send(self, step: int, values: dict[str, Any]) -> None:
        if self._run is not None and values:
            self._last_step = max(self._last_step, int(step))
            self._run.log(values, step=self._last_step)


def _start_wandb(
    config: WandbConfig, run_dir: Path, run_config: Mapping[str, Any], run_id: str | None, timeout: float
) -> Any:
    import wandb

    run_dir.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"init_timeout": timeout, "silent": True, "console": "off"}
    if "finish_timeout" in getattr(wandb.Settings, "model_fields", ()):  # not in every version that will do
        settings["finish_timeout"] = timeout
    return wandb.init(
        mode=config.mode,
        project=config.project,
        entity=config.entity,
        group=config.group,
        name=config.name,
        tags=config.tags,
        dir=str(run_dir),
        id=run_id,
        config=to_json(run_config),
        # Offline wandb cannot know whether the run exists; `wandb sync` joins the parts by their id.
        resume="allow" if run_id is not None and config.mode == "online" else None,
        reinit="create_new",  # a sweep has many runs in one process
        settings=wandb.Settings(**settings),
    )


def _finite(metrics: Metrics) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if value is not None and math.isfinite(value)}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _warn(message: str) -> None:
    warnings.warn(f"rlstable: {message}", RuntimeWarning, stacklevel=3)
