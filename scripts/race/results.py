"""Which rows of docs/race.jsonl measure a leg."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence

from rlstable.cli.compose import compose
from scripts import results
from scripts.process import pins
from scripts.race.legs import Leg
from scripts.results import Row

RIVALS = ("brax", "sb3", "sbx", "rsl_rl")


def versions(side: str) -> dict[str, str]:
    """Returns the versions of a side's packages."""
    return {"python": platform.python_version(), **pins(side)} if side in RIVALS else results.versions()


def identity(leg: Leg, kind: str) -> Row:
    """Returns the values that a leg's rows of all rounds have in common on a kind of device."""
    fixed = {name: getattr(leg, name) for name in ("measure", "task", "side", "case", "warm", "threshold")}
    common = {**fixed, "kind": kind, "settings": leg.text, "versions": versions(leg.side)}
    return common | ({"recipe": recipe(leg)} if leg.side == "ours" else {})


def recipe(leg: Leg) -> str:
    """Returns a digest of the PPO and network settings of our leg, so that another recipe is another measurement."""
    config = compose(list(leg.settings))
    chosen = {"ppo": config.ppo.model_dump(mode="json"), "network": config.network.model_dump(mode="json")}
    return hashlib.blake2s(json.dumps(chosen, sort_keys=True).encode(), digest_size=4).hexdigest()


def measured(rows: Sequence[Row], leg: Leg, kind: str) -> dict[int, Row]:
    """Returns a leg's rows by round, without rows that reached a shorter time limit than the leg's."""
    own = results.matching(rows, **identity(leg, kind))
    return {row["round"]: row for row in own if row.get("ending") != "time limit" or row["limit"] >= leg.limit}
