"""docs/guards.md names the keys and causes of the guards, and the code of docs/write_a_guard.md works."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from toys import PointMass, State

import rlstable
from rlstable.cli.compose import compose
from rlstable.config.guards import GuardsConfig
from rlstable.ppo.guards import guards_of
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile")

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "guards.md").read_text()


def flat(guards: GuardsConfig) -> dict[str, Any]:
    sections = guards.model_dump().items()
    return {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}


def test_guards_page_mentions_no_unknown_key() -> None:
    sections = "|".join(GuardsConfig.model_fields)
    named = re.findall(rf"`(?:guards\.)?((?:{sections})\.\w+)`", PAGE)
    assert set(named) <= set(flat(GuardsConfig()))


def test_guards_page_has_the_causes_and_stop_reasons_of_the_guards() -> None:
    config = compose(["env=fast"])
    sites = guards_of(config.guards, config.ppo, {})
    guards = {name: guard for site in sites.values() for name, guard in site.items()}
    told = dict(re.findall(r"`guards/(\w+)/trips`: ([^|;]+)", PAGE))
    assert {name: tuple(re.findall(r"`(\w+)`", re.sub(r"\(.*\)", "", text))) for name, text in told.items()} == {
        name: guard.causes for name, guard in guards.items()
    }
    endings = re.findall(r"^\| `(\w+)` \|[^|]+\| `(\w+)` \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(endings) == 1 + len(sites["state"])
    for name, reason, code in endings:
        expected = StopReason.no_update_accepted if name == "finite_update" else StopReason.of_guard(name)
        assert (reason, int(code)) == (expected.name, expected.exit_code)


class Env(PointMass):
    """A point with a height, 1 more than its distance: within the circle of 1.5 it may come to 2.5."""

    def reset(self, rng: jax.Array) -> State:
        return raised(super().reset(rng))

    def step(self, state: State, action: jax.Array) -> State:
        physics = state.pipeline_state
        return raised(super().step(state.replace(pipeline_state=physics.replace(q=physics.q[:2])), action))


def raised(state: State) -> State:
    physics = state.pipeline_state
    height = 1.0 + jnp.linalg.norm(physics.q)
    return state.replace(pipeline_state=physics.replace(q=jnp.append(physics.q, height)))


def test_guard_of_the_page_runs_and_passes_its_test(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, test = re.findall(r"```python\n(.*?)```", (DOCS / "write_a_guard.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) < 40
    module = ModuleType("my.module")
    module.Env = Env  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my", ModuleType("my"))
    monkeypatch.setitem(sys.modules, "my.module", module)
    small = functools.partial(
        rlstable.fit,
        total_steps=640,
        devices=1,
        ppo={"num_envs": 8, "batch_size": 8, "num_minibatches": 2, "num_updates_per_batch": 1, "unroll_length": 4},
        network={"policy_hidden_layer_sizes": (8,), "value_hidden_layer_sizes": (8,)},
        eval={"num_evals": 0},
        overrides=["env.episode_length=12", "logging=quiet"],
    )
    monkeypatch.setattr(rlstable, "fit", small)
    names: dict[str, Any] = {"__name__": "page"}
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))  # dataclasses look their module up
    exec(compile(code, "docs/write_a_guard.md", "exec"), names)
    result, last = names["result"], names["result"].history[-1]
    assert result.stop_reason is StopReason.completed
    assert last["guards/height/trips"] == last["guards/height/high"] > 0
    assert "guards/height/low" not in last
    assert last["guards/quarantine/trips"] == 0
    events = (here / "runs" / "height" / "events.jsonl").read_text()
    assert re.search(r'"guard_tripped".*"height".*"high"', events)
    names |= {"jax": jax, "Env": Env}
    exec(compile(test, "docs/write_a_guard.md", "exec"), names)
    names["test_low_base_is_quarantined_under_its_cause"]()
