"""The page of a sweep: best setting, curves, tables, links, odd names, and the page in a browser."""

from __future__ import annotations

import html
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import PHONE, opened
from sweep_folders import add_job, add_result, add_run

from rlstable.io.run_folder import write_overrides
from rlstable.report.__main__ import main
from rlstable.report.sweep import read_sweep, settings_of
from rlstable.report.sweep_page import sweep_page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
TAGS = re.compile(r"<[^>]*>")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two rates times two costs with three seeds; one run diverged."""
    number = 0
    for rate in ("1e-4", "1e-3"):
        for cost in ("0", "0.1"):
            for seed in range(3):
                overrides = [f"ppo.learning_rate={rate}", f"ppo.entropy_cost={cost}", "env=ant", f"seed={seed}"]
                best = (100.0 if rate == "1e-3" else 10.0) + (cost == "0") + 0.2 * seed
                add_job(tmp_path / str(number), overrides, best, "policy_diverged" if number == 10 else "completed")
                number += 1
    (tmp_path / "0" / "report.html").write_text("a page")
    return tmp_path


def keep_running(sweep: Path) -> None:
    """The last run has not ended."""
    overrides = ["ppo.learning_rate=1e-3", "ppo.entropy_cost=0.1", "env=ant", "seed=2"]
    (sweep / "11" / "result.json").unlink()
    add_run(sweep / "11", {500: 3.0})
    write_overrides(sweep / "11", overrides)


def page_of(sweep: Path) -> str:
    return sweep_page(sweep, read_sweep(sweep))


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Texts of the cells of the first table after a heading."""
    table = page[page.index(f"<h2>{heading}</h2>") :].partition("</table>")[0]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]
    return [[html.unescape(TAGS.sub("", cell.replace("<br>", ", "))) for cell in row] for row in cells]


def test_page_begins_with_the_best_setting_and_its_command(sweep: Path) -> None:
    page = page_of(sweep)
    best = page[page.index('<section class="card best">') : page.index("</section>")]
    assert "ppo.learning_rate=1e-3 ppo.entropy_cost=0, return 101.2 [101.0, 101.4], interquartile mean of 3" in best
    assert "rlstable.train ppo.learning_rate=1e-3 ppo.entropy_cost=0 env=ant</pre>" in best
    assert page.index("</section>") < page.index("<figcaption>Return")


def test_settings_are_a_table_of_what_varies_best_first(sweep: Path) -> None:
    head, *rows = rows_of(page_of(sweep), "Settings")
    assert head == [
        "ppo.learning_rate", "ppo.entropy_cost", "return", "95 % interval", "runs", "trips", "rollbacks",
    ]  # fmt: skip
    runs = "9 completed 100.0, 10 policy_diverged 100.2, 11 completed 100.4"
    assert rows[1] == ["1e-3", "0.1", "100.2", "[100.0, 100.4]", runs, "0", "0"]
    assert [row[:4] for row in rows] == [
        ["1e-3", "0", "101.2", "[101.0, 101.4]"],
        ["1e-3", "0.1", "100.2", "[100.0, 100.4]"],
        ["1e-4", "0", "11.2", "[11.0, 11.4]"],
        ["1e-4", "0.1", "10.2", "[10.0, 10.4]"],
    ]


def test_page_of_a_sweep_that_has_not_ended_names_no_best_setting(sweep: Path) -> None:
    keep_running(sweep)
    page = page_of(sweep)
    assert "No setting is the best: 1 of 12 runs have not run to their end." in page and "Best setting" not in page
    assert "ant, 4 settings, 12 runs, 1 not ended" in page
    assert rows_of(page, "Settings")[2][4] == "9 completed 100.0, 10 policy_diverged 100.2, 11 not ended 3.0"


def test_runs_link_to_their_page_or_their_folder(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    page = page_of(sweep)
    assert '<a href="0/report.html">0</a>' in page and '<a href="1">1</a>' in page
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "pages" / "sweep.html"
    main([f"sweep={sweep}", f"out={elsewhere}"])
    (link,) = re.findall(r'href="([^"]*/0/report.html)"', elsewhere.read_text())
    assert (elsewhere.parent / link).resolve() == (sweep / "0" / "report.html").resolve()


def test_odd_names_and_values_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / 'läufe [1] "<b>"'
    for number, name in enumerate(("[a]#1", 'ü "q"', "50 %?")):
        add_job(folder / name, [f"logging.wandb.name={EVIL}{number}", "env.kwargs={a: 'ü'}"], float(number))
        (folder / name / "report.html").write_text("")
    page = page_of(folder)
    assert "<script>alert" not in page and "<img" not in page and "<b>" not in page
    links = re.findall(r'href="([^"]*)"', page)
    assert sorted(unquote(link) for link in links) == sorted(
        f"{name}/report.html" for name in ("[a]#1", 'ü "q"', "50 %?")
    )
    assert not any(set(link) & set("#?\"'< ") for link in links)
    best = html.unescape(page[page.index("<pre>") + len("<pre>") : page.index("</pre>")])
    assert best == settings_of(read_sweep(folder))[0].command


@pytest.mark.parametrize(
    "result", [None, {"stop_reason": "error"}, {"stop_reason": "completed", "return": float("nan")}]
)
def test_page_of_a_sweep_without_a_return_says_so(result: dict | None, tmp_path: Path) -> None:
    add_run(tmp_path / "0")
    write_overrides(tmp_path / "0", ["a=1"])
    if result is not None:
        add_result(tmp_path / "0", ["a=1"], **result)
    page = page_of(tmp_path)
    assert "No setting is the best: " in page and "nan" not in page
    assert "<figcaption>Return" not in page
    assert len(rows_of(page, "Settings")) == 2


def test_browser_shows_the_page_of_a_sweep_on_a_phone(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_job(sweep / "13", [f"network.policy_hidden_layer_sizes=[{'256,' * 30}256]", "seed=0"], 200.0)
    main([f"sweep={sweep}"])
    path = Path(capsys.readouterr().out.strip())
    assert path == sweep / "report.html"
    assert path.read_text() == page_of(sweep)
    with opened(path, PHONE) as found:
        assert found.overflow == 0
        runs = found.page.locator("table").last
        assert (runs.locator("tbody tr").count(), runs.locator("a").count()) == (5, 13)
        for table in found.page.locator(".scroll").all():
            assert table.evaluate("card => card.getBoundingClientRect().right <= window.innerWidth")
        card = found.page.locator(".pinned .card").first  # its first column stays when it is scrolled
        card.evaluate("card => card.scrollLeft = 9999")
        assert card.evaluate("card => card.scrollLeft > 0")
        assert card.locator("td").first.bounding_box()["x"] < card.bounding_box()["x"] + 2
        legend = found.page.locator(".settings .entry")
        assert legend.count() == 5
        assert legend.evaluate_all("all => all.every(one => one.getBoundingClientRect().right < window.innerWidth)")
        found.page.locator("svg.chart:visible").hover(position={"x": 200, "y": 100})
        assert "ppo.learning_rate=1e-3" in found.page.locator(".tip").inner_text()
        assert (found.requests, found.complaints) == ([], [])
        runs.locator('a[href="0/report.html"]').click()
        found.page.wait_for_url((sweep / "0" / "report.html").as_uri())
        assert found.page.content().count("a page") == 1
