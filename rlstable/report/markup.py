"""Building blocks of HTML pages: escaped text, numbers, tables, stop reasons, and the file around them."""

from __future__ import annotations

import functools
import html
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlstable.supervise.stop_reasons import FROM_OUTSIDE, StopReason

COLOURS = 12
REFRESH_SECONDS = 30  # between two pages of a run that has not ended


def document(title: str, parts: Sequence[str], refresh: bool = False) -> str:
    """A whole page as one HTML file that loads nothing from a server; empty parts are left out.

    With `refresh` the browser loads the page again now and then, because a run is still writing it.
    """
    again = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if refresh else ""
    body = "\n".join(filter(None, parts))
    return _template().substitute(title=text(f"rlstable: {title}"), body=body, refresh=again)


@functools.cache
def _template() -> string.Template:
    return string.Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def text(value: object) -> str:
    return html.escape(str(value))


def code(value: object) -> str:
    return f"<code>{text(value)}</code>"


def number(value: float | None, form: str = ",.1f") -> str:
    return "–" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table; its cells are HTML, and `numbers` are the columns that are aligned to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="n">{cell}</{tag}>' if place in numbers else f"<{tag}>{cell}</{tag}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head_row = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="card scroll"><table>{head_row}<tbody>{body}</tbody></table></div>'


def swatch(index: int) -> str:
    return f'<span class="swatch b{index % COLOURS}"></span>'


def stop_reason(result: Mapping[str, object] | None) -> str:
    """The name of a run's stop reason; `not ended` without a result."""
    return "not ended" if result is None else str(result.get("stop_reason"))


def coloured_ending(result: Mapping[str, object] | None) -> str:
    """The stop reason in its colour as HTML, with the meaning as tooltip."""
    known = StopReason.__members__.get(stop_reason(result))
    meaning = "the run is still running, or was killed" if result is None else known.meaning if known else ""
    outside = result is None or known in FROM_OUTSIDE
    style = "warn" if outside else "good" if known is not None and known.succeeded else "bad"
    return f'<span class="{style}" title="{text(meaning)}">{text(stop_reason(result))}</span>'
