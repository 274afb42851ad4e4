"""Brax's own tests of its PPO, with nothing but an import line changed to rlstable."""

import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from brax.training.agents import ppo

PACKAGE = "brax.training.agents.ppo"
CHANGED = {
    "train_test": (f"from {PACKAGE} import train as ppo", "from rlstable import brax_ppo as ppo"),
    "checkpoint_test": (f"from {PACKAGE} import checkpoint", "from rlstable.brax_ppo import checkpoint"),
}
QUICK = ("test_ppo_params_config", "test_save_and_load_checkpoint")


def brax_cases() -> Iterator[unittest.TestCase]:
    """Every case of Brax's tests but the three with pixels."""
    for name, (before, after) in CHANGED.items():
        source = (Path(next(iter(ppo.__path__))) / f"{name}.py").read_text()
        assert source.count(before) == 1
        module = types.ModuleType(f"changed_{name}")
        sys.modules[module.__name__] = module  # absl looks the module up
        exec(compile(source.replace(before, after), f"{name}.py", "exec"), module.__dict__)
        for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
            yield from (case for case in suite if "testPixelsPPO" not in case.id())


CASES = {case._testMethodName: case for case in brax_cases()}


@pytest.fixture
def threefry() -> Iterator[None]:
    """The random numbers of Brax's own main."""
    jax.config.update("jax_threefry_partitionable", False)
    yield
    jax.config.update("jax_threefry_partitionable", True)


def test_brax_has_thirty_three_cases_without_pixels() -> None:
    assert len(CASES) == 33


@pytest.mark.usefixtures("threefry")
@pytest.mark.filterwarnings("ignore:network_factory:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_case_of_brax_passes_on_rlstable(name: str, here: Path) -> None:
    result = unittest.TestResult()
    CASES[name].run(result)
    assert not result.errors and not result.failures, "\n".join(text for _, text in result.errors + result.failures)
    assert result.testsRun == 1 and not result.skipped
