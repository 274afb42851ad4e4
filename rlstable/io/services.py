"""Services that receive metrics and events: TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.config.run import WandbConfig
from rlstable.io.files import subfolder
from rlstable.io.jsonl import to_json

Metrics = Mapping[str, float | int | None]
_TIMEOUT = 60.0  # seconds for the start and the end of a W&B run


class TensorBoard:
    """Scalars and events in `<run>/tensorboard`, of a resumed run from `resume_step` on.

    Raises `ConfigError` if tensorboardX is not installed.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"logging.tensorboard: needs the package tensorboardX; {install('tensorboard')}, "
                "or set logging.tensorboard=false"
            ) from error
        purge = None if resume_step is None else int(resume_step) + 1
        self._writer = SummaryWriter(str(subfolder(Path(run_dir), "tensorboard")), flush_secs=10, purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(key, value, int(step))

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        self._writer.add_text(f"events/{kind}", json.dumps(to_json(fields)), int(step))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, which continues the run `run_id` if there is one; raises if it does not start.

    After a rollback, smaller steps are logged at the largest step so far, because W&B drops decreasing steps. The
    metric `events/<kind>` counts events.
    """

    def __init__(self, config: WandbConfig, run_dir: Path, run_config: Mapping[str, Any], run_id: str | None = None):
        self._run = _start_wandb(config, run_dir, run_config, run_id)
        self.run_id = str(self._run.id)
        self.url: str | None = getattr(self._run, "url", None)
        self._last_step = int(self._run.step or 0)
        self._counts: dict[str, int] = {}

    def log(self, step: int, metrics: Metrics) -> None:
        self._send(step, {key: value for key, value in metrics.items() if value is not None})

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        del fields
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._send(step, {f"events/{kind}": self._counts[kind]})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _send(self, step: int, values: dict[str, Any]) -> None:
        if self._run is not None and values:
            self._last_step = max(self._last_step, int(step))
            self._run.log(values, step=self._last_step)


def _start_wandb(config: WandbConfig, run_dir: Path, run_config: Mapping[str, Any], run_id: str | None) -> Any:
    import wandb

    subfolder(run_dir, "wandb")
    settings: dict[str, Any] = {"init_timeout": _TIMEOUT, "silent": True, "console": "off"}
    if "finish_timeout" in getattr(wandb.Settings, "model_fields", ()):  # not in every supported version
        settings["finish_timeout"] = _TIMEOUT
    return wandb.init(
        **config.model_dump() | {"tags": config.tags or None},  # None leaves WANDB_TAGS in force
        dir=str(run_dir),
        id=run_id,
        config=to_json(run_config),
        # Offline, W&B cannot check whether the run exists; `wandb sync` joins the parts by their id.
        resume="allow" if run_id is not None and config.mode == "online" else None,
        reinit="create_new",  # a sweep has many runs in one process
        settings=wandb.Settings(**settings),
    )
