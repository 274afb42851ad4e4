"""The listeners that a configuration asks for."""

from __future__ import annotations

from rlstable.config import Config
from rlstable.runner.listener import Listener


def listeners_of(config: Config) -> list[Listener]:
    """The report page and the recorded episodes, if the configuration has them."""
    found: list[Listener] = []
    if config.render.every:
        from rlstable.render.live import EpisodePages

        found.append(EpisodePages())
    if config.logging.report:
        from rlstable.report.live import ReportPage

        found.append(ReportPage())  # last: it links the episodes
    return found
