"""Programs that tests of whole runs share: whoever comes first builds one, others of its kind are given it.

jax's own cache on the disk saves the compiling alone; tracing, lowering and reading take two seconds a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import jax
import pytest

from rlstable.compilation.programs import Arguments, Programs
from rlstable.config import Config
from rlstable.policy.evaluator import Evaluator, make_evaluator
from rlstable.runner import loop, setup_cache
from rlstable.runner.setup import TrainingSetup

# Sections that no program is made of. The seed and a fault's numbers are data of the training state.
_OF_THE_HOST = ("checkpoint", "logging", "resume", "seed", "seeds", "supervise")
_DATA_OF_A_FAULT = ("value", "probability", "start", "iterations", "seed")

_programs: dict[Any, Future[Any]] = {}
_outputs: dict[Any, Any] = {}
# Guards of a test's own are known by their address, which must not become another's.
_guards: list[Any] = []


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Every run inside shares; a run says that it compiles, whether it does or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSetup, "__init__", _assemble)
        patch.setattr(TrainingSetup, "begin", lambda _: None)  # nobody would wait for it
        patch.setattr(loop, "make_evaluator", _make_evaluator)
        factories = dataclasses.replace(setup_cache.DEFAULT_FACTORIES, evaluator=_make_evaluator)
        patch.setattr(setup_cache, "DEFAULT_FACTORIES", factories)
        yield


def forget() -> None:
    """Gives all of them up."""
    for kept in (_programs, _outputs, _guards):
        kept.clear()


class _Shared(Programs):
    """Gives what was built of the same name, configuration and arguments."""

    def __init__(self, builder: Programs, origin: Any):
        self._builder = builder
        self._origin = origin

    def build(
        self, name: str, function: Any, arguments: Arguments, donates: bool = False, rarely_used: bool = False
    ) -> Future[Any]:
        given = arguments()
        key = (self._origin, name, _kind(given))
        if key not in _programs or _programs[key].exception() is not None:
            _programs[key] = self._builder.build(name, function, lambda: given, donates, rarely_used)
            with self._builder._precision.compiled():
                _outputs[self._origin, name] = jax.eval_shape(function, *given)
        return _programs[key]

    def outputs(self, name: str) -> Any:
        return _outputs.get((self._origin, name))


def _assemble(
    self: TrainingSetup, config: Config, *args: Any, make: Any = TrainingSetup.__init__, **named: Any
) -> None:
    make(self, config, *args, **named)
    ppo = self.ppo
    guards = (self.env.guards, ppo.batch_guards, ppo.update_guards, ppo.state_guards)
    _guards.append(guards)
    kinds = (type(self), type(ppo), type(self.env), type(self.env.env))
    shared = _Shared(
        self._programs,
        (_key(config, "eval"), config.may_tighten_clipping, config.may_separate_rates, kinds, repr(guards), self._mesh),
    )
    self._programs = self._resets._programs = shared


def _make_evaluator(config: Config, *args: Any) -> Evaluator:
    made = make_evaluator(config, *args)
    made._programs = _Shared(made._programs, ("evaluation", _key(config)))
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


def _kind(given: tuple[Any, ...]) -> Any:
    leaves, structure = jax.tree.flatten(given)

    def kind(x: Any) -> Any:
        return x.shape, str(x.dtype), getattr(x, "weak_type", False), getattr(x, "sharding", None)

    return structure, tuple(map(kind, leaves))
