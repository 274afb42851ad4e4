"""The listeners that a configuration asks for."""

from __future__ import annotations

from rlstable.config.run import LoggingConfig, RenderConfig
from rlstable.runner.listener import Listener


def listeners_of(render: RenderConfig, logging: LoggingConfig) -> list[Listener]:
    """The report page and the recorded episodes, if the configuration has them."""
    found: list[Listener] = []
    if render.every:
        from rlstable.render.live import EpisodePages

        found.append(EpisodePages())
    if logging.report:
        from rlstable.report.live import ReportPage

        found.append(ReportPage())  # last: it links the episodes
    return found
