"""The README is short, and its numbers are those of the pages that it links."""

from __future__ import annotations

import re

from commands import ROOT

from rlstable.supervise.stop_reasons import StopReason

README = (ROOT / "README.md").read_text()


def numbers(pattern: str, text: str) -> tuple[int, ...]:
    """The numbers of the first place that a pattern fits."""
    found = re.search(pattern, text)
    assert found is not None, pattern
    return tuple(map(int, found.groups()))


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_readme_has_at_most_80_lines() -> None:
    assert len(README.splitlines()) <= 80


def test_numbers_of_the_readme_are_those_of_the_pages() -> None:
    of_faults = numbers(r"of (\d+) injected faults, (\d+) leave the least seed", README)
    assert of_faults == numbers(r"default guards, (\d+) of (\d+) faults are green", page("survival"))[::-1]
    at_the_end = r"`guards=default` (\d+) of (\d+) \([\d.]+%\) at the end"
    assert numbers(r"(\d+) of (\d+) long trainings", README) == numbers(at_the_end, page("stability"))
    learned = numbers(r"(\d+) of (\d+) tasks reach 90 %", README)
    assert learned == numbers(r"(\d+) of (\d+) with a public record reach 90%", page("tasks"))
    assert numbers(r"one of (\d+) named reasons", README) == (len(StopReason),)


def test_links_and_pictures_of_the_readme_exist() -> None:
    linked = re.findall(r"\]\(([^)#:]+)\)|src=\"([^\"]+)\"", README)
    assert len(linked) > 20
    assert [path for both in linked for path in both if path and not (ROOT / path).exists()] == []
