"""What a run says when it has to give up: what was tried, and what a person could try next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rlstable.endings import Ending
from rlstable.supervise.recovery import Attempts
from rlstable.supervise_config import Remedy

_NEXT = {
    Ending.state_not_finite: "Leave guards.update on, which keeps a bad number out of the parameters; look at the "
    "first guard_tripped event for where it was born.",
    Ending.no_update_accepted: "Look at guards/update and guards/spike in metrics.jsonl for the cause. Lower "
    "ppo.learning_rate by ten; with float16 networks take precision=bfloat16 or the default; a loss that is not finite "
    "from the first iteration comes from the environment's rewards or observations.",
    Ending.physics_unstable: "The simulation itself breaks down: try a smaller timestep, more solver iterations, "
    "softer contacts or smaller actuator gains in the model, precision=highest on a GPU, and a tighter "
    "guards.quarantine.max_abs_state to hear of it earlier.",
    Ending.value_loss_exploded: "Scale rewards down with ppo.reward_scaling so that a good step earns about 1, or set "
    "ppo.normalize_rewards=true or ppo.normalize_values=true; lower ppo.learning_rate.",
    Ending.policy_diverged: "Lower ppo.learning_rate, set guards.limiters.kl=0.05 or "
    "ppo.learning_rate_schedule=adaptive_kl, and take fewer epochs (ppo.num_updates_per_batch).",
    Ending.policy_collapsed: "Lower ppo.learning_rate, set ppo.normalize_values=true and "
    "ppo.normalize_advantage=true, or take larger batches; the signs in the report say which network was at fault. "
    "Where returns swing by themselves, raise guards.return_watch.tolerance.",
    Ending.guard_exhausted: "A guard of your own gave up; its trips are in events.jsonl with their causes.",
}


_WITH_SIGNS = (Ending.policy_diverged, Ending.policy_collapsed)  # whose causes are in learning


def paragraph(cause: Ending, attempts: Attempts, signs: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """What was tried in vain against a cause, and what might help.

    Args:
        cause: The ending that there would have been without attempts.
        attempts: Those of the window.
        signs: Signs that were said, `SignMemory.said`.
    """
    tried = Counter(str(Remedy.model_validate(attempt["remedy"])) for attempt in attempts.recent)
    listed = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in tried.items())
    count = len(attempts.recent)
    went_back = (
        f"Went back to the last good state {count} {'time' if count == 1 else 'times'}, with {listed}; "
        if count
        else ""
    )
    named = ", ".join(f"{name} (step {sign['first_step']:,})" for name, sign in (signs or {}).items())
    said = f" Signs before it: {named}." if named and cause in _WITH_SIGNS else ""
    return f"{went_back}{cause.meaning.split(';')[0]}. {_NEXT[cause]}{said}"
