"""Pages of results: Markdown tables, and sections between markers."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rlstable.policy.statistics import Estimate


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    rule = ["---" if column in left else "---:" for column in range(len(header))]
    return [f"| {' | '.join(cells)} |".replace("\n", " ") for cells in (header, rule, *rows)]


def merged(rows: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """Joins the names, first cells, of rows whose other cells are the same."""
    alike = dict.fromkeys(row[1:] for row in rows)
    return [["; ".join(row[0] for row in rows if row[1:] == cells), *cells] for cells in alike]


def interval(of: Estimate, text: Callable[[float], str], unit: str = "") -> str:
    """Returns a value and its interval as text; of a single measurement only the value."""
    bounds = "" if of.low is None or of.high is None else f" [{text(of.low)}, {text(of.high)}]"
    return f"{text(of.value)}{unit}{bounds}"


def fill(path: Path, parts: Mapping[str, str]) -> None:
    """Replaces a page's generated parts between their markers, or appends them; the page's prose stays."""
    page = path.read_text() if path.exists() else ""
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin not in page:
            page = f"{page.rstrip()}\n\n{begin}\n{end}\n".lstrip()
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    path.write_text(page)
