"""Small pictures of a setting's seeds and their interval, all on one scale."""

from __future__ import annotations

from collections.abc import Sequence

from rlstable.report.chart import Scale, readable
from rlstable.report.sweep import Setting

_WIDTH, _HEIGHT, _ROOM = 140.0, 18.0, 6.0


class Forest:
    """A scale over all returns of a sweep.

    Args:
        returns: All returns.
    """

    def __init__(self, returns: Sequence[float]):
        low, high = min(returns, default=0.0), max(returns, default=0.0)
        room = 0.0 if high > low else max(abs(high), 1.0)  # equal returns are in the middle
        self._scale = Scale(low - room, high + room, _ROOM, _WIDTH - _ROOM)

    def drawn(self, setting: Setting, colour: int | None) -> str:
        """Returns a dot per seed, a thick one for the interquartile mean, and a line over its interval, as SVG.

        Args:
            setting: The setting.
            colour: Index of the colour; None for grey.
        """
        if setting.iqm is None:
            return "–"
        style = "mark plain" if colour is None else f"c{colour}"
        middle = _HEIGHT / 2
        parts = [
            f'<circle class="{style} thin" cx="{float(self._scale(score)):.1f}" cy="{middle:g}" r="3.5"/>'
            for score in setting.scores
        ]
        if setting.iqm.low is not None and setting.iqm.high is not None:
            start, end = float(self._scale(setting.iqm.low)), float(self._scale(setting.iqm.high))
            wide = max(end - start, 1.0)
            parts.append(f'<rect class="{style}" x="{start:.1f}" y="{middle - 1:g}" width="{wide:.1f}" height="2"/>')
        parts.append(
            f'<rect class="{style}" x="{float(self._scale(setting.iqm.value)) - 1.5:.1f}" y="3" width="3" height="12"/>'
        )
        title = ", ".join(readable(score) for score in sorted(setting.scores))
        return (
            f'<svg class="forest" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
            f'aria-label="returns {title}"><title>{title}</title>{"".join(parts)}</svg>'
        )
