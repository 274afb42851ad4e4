"""Guard memories and trip counters saved by the previous version keep their values under the new names."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from toys import assemble, tiny_config

from rlstable.device.packed import PackedDict
from rlstable.ppo.state import TrainState
from rlstable.runner.renamed_guards import has_old_names, under_new_names, under_old_names
from rlstable.supervise.snapshots import SavedState, template

OLD = ("policy", "state", "storm", "transition", "update")
NEW = {"state": "finite_state", "transition": "finite_samples", "update": "finite_update"}


def saved_before(counts: dict[str, list[int]]) -> SavedState:
    """A checkpoint of the previous version, without snapshots, with the given trip counts."""
    _, state = assemble(tiny_config())
    now = {NEW.get(name, name): jnp.array(own) for name, own in counts.items()}
    layout = PackedDict.of(now).layout
    trips = PackedDict(PackedDict.of({name: jnp.array(own) for name, own in counts.items()}).whole, layout)
    memory = {name: jnp.array(float(sum(own))) for name, own in counts.items()}
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(TrainState)}
    fields |= {"guard_memory": memory, "counters": dataclasses.replace(state.counters, trips=trips)}
    return SavedState(**fields)


def test_trip_counters_of_the_previous_version_belong_to_the_same_guards() -> None:
    counts = {name: [10 * n + 1, 10 * n + 2][: 1 + n % 2] for n, name in enumerate(OLD)}
    found = under_new_names(saved_before(counts))
    for name, expected in counts.items():
        assert np.asarray(found.counters.trips[NEW.get(name, name)]).tolist() == expected
        assert float(found.guard_memory[NEW.get(name, name)]) == sum(expected)


def test_template_for_the_previous_version_has_the_old_names_in_every_snapshot() -> None:
    _, state = assemble(tiny_config(guards={}))
    old = under_old_names(template(state))
    for memory in (old.guard_memory, old.last_good["guard_memory"], old.best["guard_memory"]):
        assert set(NEW) <= set(memory) and not set(NEW.values()) & set(memory)


def test_settings_of_this_version_have_no_old_names() -> None:
    assert not has_old_names(tiny_config().model_dump(mode="json"))
    assert has_old_names({"guards": {"transition": {"enabled": True}}})
