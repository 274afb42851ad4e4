"""Records episodes of the current policy while it trains, as pages in the folder `episodes` of a run."""

from __future__ import annotations

import functools

from rlstable.device.precision import Level
from rlstable.io.files import subfolder, write_atomically
from rlstable.policy.evaluator import acting, evaluation_env
from rlstable.render.page import page
from rlstable.render.recording import EpisodeRecorder, steps_of
from rlstable.runner.host_state import Draw
from rlstable.runner.listener import Listener
from rlstable.runner.seed import Seed


class EpisodePages(Listener):
    """Records an episode of every seed after every `render.every`th evaluation.

    Recordings have their own program and random keys, so that training is the same with and without them. The program
    is compiled once for each precision level.
    """

    def __init__(self) -> None:
        self._recorders: dict[Level, EpisodeRecorder] = {}

    def evaluated(self, seed: Seed) -> None:
        step = seed.host.step
        if not seed.schedule.records(seed.step_before, step) or seed.saving.gone:
            return
        recorded = self._recorder(seed).record(
            *seed.policy_snapshot._replace(key=seed.keys.between(Draw.RECORDING)), step
        )
        write_atomically(subfolder(seed.run_dir, "episodes") / f"{step}.html", page(recorded))
        seed.event("episode_recorded", file=f"episodes/{step}.html", **{"return": recorded.recordings[0].total})

    def _recorder(self, seed: Seed) -> EpisodeRecorder:
        """Plays one episode of at most `render.seconds`, in the environment of evaluations."""
        if seed.level not in self._recorders:
            env, config = seed.programs.played_env(seed.host), seed.config.with_precision(seed.level._asdict())
            steps = min(steps_of(env, config.render.seconds, config.env.action_repeat), config.env.episode_length)
            config = config.model_copy(update={"env": config.env.model_copy(update={"episode_length": steps})})
            batched, about = functools.partial(evaluation_env, config), (config.env.name, seed.setup.loaded.backend)
            act = acting(seed.setup.ppo.networks, seed.setup.precision.matmul, config.eval.deterministic)
            args = act, seed.setup.precision, about, 1, seed.programs.compiling
            self._recorders[seed.level] = EpisodeRecorder(env, batched, *args)
        return self._recorders[seed.level]
