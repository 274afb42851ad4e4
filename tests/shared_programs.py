"""Programs that tests of whole runs share: whoever comes first compiles one, others of its kind are given it.

jax's own cache on the disk saves the compiling alone; tracing, lowering and reading take two seconds a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from rlstable import fleet, supervisor
from rlstable.assembly import Assembly, Program
from rlstable.config import Config
from rlstable.evaluation import Evaluator, make_evaluator
from rlstable.ppo.state import TrainState

# Sections that no program is made of. The seed and a fault's numbers are data of the training state.
_OF_THE_HOST = ("checkpoint", "sinks", "resume", "seed", "seeds", "supervise")
_DATA_OF_A_FAULT = ("value", "probability", "start", "iterations", "seed")

_programs: dict[Any, tuple[Any, Program]] = {}
_plays: dict[Any, Any] = {}


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Every run inside shares; a run says that it compiles, whether it does or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Assembly, "compiled", _compiled)
        patch.setattr(Assembly, "begin", lambda _: None)  # nobody would wait for it
        patch.setattr(fleet, "make_evaluator", _make_evaluator)
        patch.setattr(supervisor, "ALONE", dataclasses.replace(supervisor.ALONE, evaluator=_make_evaluator))
        yield


def forget() -> None:
    """Gives all of them up."""
    _programs.clear()
    _plays.clear()


def _compiled(self: Assembly, *states: TrainState, make: Callable[..., Program] = Assembly.compiled) -> Program:
    ppo = self.ppo
    guards = (self.env.guards, ppo.batch_guards, ppo.update_guards, ppo.state_guards)
    kinds = (type(self), type(ppo), type(self.env), type(self.env.env))
    key = (_key(self._config, "eval"), self._config.tightens, kinds, repr(guards), _kind(states))
    if key in _programs:
        with self._compiling("training"):
            return _programs[key][1]
    # With the guards it was made of: one of a test's own is known by its address.
    _programs[key] = (guards, make(self, *states))
    return _programs[key][1]


def _make_evaluator(config: Config, *args: Any) -> Evaluator:
    made = make_evaluator(config, *args)
    made._play = _plays.setdefault(
        _key(config), made._play
    )  # traced and lowered, but for what it is compiled each time
    return made


def _key(config: Config, *leave_out: str) -> Any:
    """What a program is made of, as far as the configuration says it."""
    sections = config.model_dump(mode="json")
    for name in (*_OF_THE_HOST, *leave_out):
        del sections[name]
    for name in _DATA_OF_A_FAULT:
        del sections["fault"][name]
    sections["fault"]["site"] = config.fault.site is not None
    if config.ppo.learning_rate_schedule == "constant" and not config.ppo.learning_rate_warmup:
        del sections["total_steps"]  # it is no part of such a rate
    return json.dumps(sections), jax.config.values["jax_disable_most_optimizations"]


def _kind(states: tuple[TrainState, ...]) -> Any:
    leaves, structure = jax.tree.flatten(states)
    return structure, tuple((x.shape, str(x.dtype), getattr(x, "weak_type", False), x.sharding) for x in leaves)
