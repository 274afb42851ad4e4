"""Compiled programs that tests of whole runs share: the first run builds a program, later runs get the same one.

JAX's cache on disk saves only the compilation; tracing, lowering and reading take two seconds a run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import jax
import pytest

from rlstable.compilation.compiler import Arguments, Compiler
from rlstable.config import Config
from rlstable.policy.evaluator import Evaluator, make_evaluator
from rlstable.runner import programs
from rlstable.runner.setup import TrainingSetup

# Sections that do not change any program. The seed and the numbers of a fault are data of the training state.
_OF_THE_HOST = ("checkpoint", "logging", "render", "resume", "seed", "seeds", "supervise", "total_steps")
_DATA_OF_A_FAULT = ("value", "probability", "start", "iterations", "seed")

_programs: dict[Any, Future[Any]] = {}
_outputs: dict[Any, Any] = {}
# Guards that a test passes as objects are known by their address, so they must stay alive.
_guards: list[Any] = []


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Makes all runs inside share their programs; the console lines about compiling stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSetup, "__init__", _assemble)
        patch.setattr(TrainingSetup, "begin", lambda _: None)  # no run would wait for this program
        patch.setattr(programs, "make_evaluator", _make_evaluator)
        yield


def forget() -> None:
    """Drops all shared programs."""
    for kept in (_programs, _outputs, _guards):
        kept.clear()


class _Shared(Compiler):
    """Returns the program that was built for the same name, configuration and argument shapes."""

    def __init__(self, compiler: Compiler, origin: Any):
        self._compiler = compiler
        self._origin = origin

    def build(self, name: str, function: Any, arguments: Arguments, **options: bool) -> Future[Any]:
        given = arguments()
        key = (self._origin, name, _shapes(given))
        if key not in _programs or _programs[key].exception() is not None:
            _programs[key] = self._compiler.build(name, function, lambda: given, **options)
            with self._compiler.precision.compiled():
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
    compiler = self._compiler
    allowed = config.may_tighten_clipping, config.may_separate_rates
    self._compiler = _Shared(compiler, (_training_key(config), allowed, kinds, repr(guards), self.mesh))
    self._resets._compiler = _Shared(compiler, (_resets_key(config), kinds[2:], repr(self.env.guards)))


def _make_evaluator(config: Config, *args: Any) -> Evaluator:
    made = make_evaluator(config, *args)
    made._compiler = _Shared(made._compiler, ("evaluation", _evaluation_key(config)))
    return made


def _training_key(config: Config) -> Any:
    """The part of the configuration that the training program depends on."""
    sections = config.model_dump(mode="json")
    for name in (*_OF_THE_HOST, "eval"):
        del sections[name]
    del sections["env"]["reset_pool_refresh"], sections["ppo"]["num_resets_per_eval"]
    del sections["guards"]["finite_update"]["patience"], sections["guards"]["return_watch"]
    sections["fault"] = _fault_key(config)
    return _text(sections)


def _resets_key(config: Config) -> Any:
    sections = config.model_dump(mode="json", include={"env", "precision", "deterministic"})
    del sections["env"]["reset_pool_refresh"], sections["precision"]["loss_scale"]
    batch = min(config.env.reset_pool_size, config.ppo.num_envs)
    fault = config.fault.model_dump(mode="json") if config.fault.site == "reset" else _fault_key(config)
    return _text({**sections, "batch": batch, "fault": fault})


def _evaluation_key(config: Config) -> Any:
    """The part of the configuration that the evaluation program depends on."""
    sections = config.model_dump(mode="json", include={"deterministic", "env", "eval", "network", "precision"})
    for name in ("num_evals", "target_return"):
        del sections["eval"][name]
    del sections["env"]["reset_pool_refresh"], sections["precision"]["loss_scale"]
    guards = config.guards
    sections["guards"] = [guards.quarantine.model_dump(mode="json"), guards.limiters.model_dump(mode="json")]
    sections["normalize_observations"] = config.ppo.normalize_observations
    sections["fault"] = config.fault.model_dump(mode="json") if config.fault.eval else None
    return _text(sections)


def _fault_key(config: Config) -> dict[str, Any]:
    fault = config.fault.model_dump(mode="json")
    for name in _DATA_OF_A_FAULT:
        del fault[name]
    return fault | {"site": config.fault.site is not None}


def _text(sections: dict[str, Any]) -> Any:
    return json.dumps(sections), jax.config.values["jax_disable_most_optimizations"]


def _shapes(given: tuple[Any, ...]) -> Any:
    """Structure, shapes, types and devices of the arguments."""
    leaves, structure = jax.tree.flatten(given)

    def shape(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if sharding is not None and len(sharding.device_set) == 1:
            sharding = frozenset(sharding.device_set)  # on one device all shardings are the same
        return x.shape, str(x.dtype), getattr(x, "weak_type", False), sharding

    return structure, tuple(map(shape, leaves))
