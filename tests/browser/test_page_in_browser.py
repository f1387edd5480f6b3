"""The report page in a real browser: nothing is fetched, every control works by keyboard, and it can be read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from browsers import PHONE, WIDE, problems_of
from page_fakes import NASTY, finished_runs, written_page

from kvprobe.html.page.data import ROWS_SHOWN
from kvprobe.report.tables import interval
from kvprobe.runs import RunResult
from kvprobe.runs.section import sections_of

FIGURE = "#experiment-steady .figure"
SHOWN = "#verdict-table tbody tr:visible"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[RunResult]:
    return finished_runs(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def address(results: list[RunResult]) -> str:
    return written_page(results[0].folder.parents[1]).path.as_uri()


class Opened:
    """The page as a reader opens it, and what it said and asked for."""

    def __init__(self, browser: Any, address: str, *, unfolded: bool = True, **settings: Any) -> None:
        self.context = browser.new_context(offline=True, **settings)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        if unfolded:
            self.page.evaluate("for (const fold of document.querySelectorAll('.fold')) fold.open = true")

    def drawn(self, figure: str = FIGURE) -> Any:
        """The figure, scrolled to and drawn."""
        self.page.locator(figure).scroll_into_view_if_needed()
        self.page.locator(f"{figure} .scatterlayer .point").first.wait_for(state="attached")
        return self.page.locator(figure)


@pytest.fixture
def opened(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Opened]:
    found = Opened(browser, address, **getattr(request, "param", WIDE))
    yield found
    # Whatever a test does, nothing goes wrong in the page and nothing but the page itself is asked for.
    assert found.said == []
    asked = [url for url in found.asked if not url.startswith(("data:", "blob:"))]
    assert asked == [address]
    found.context.close()


@pytest.mark.parametrize("opened", [WIDE, PHONE], indirect=True, ids=["wide", "phone"])
def test_all_of_it_can_be_opened_and_nothing_is_wider_than_the_window(opened: Opened) -> None:
    page = opened.page
    for article in page.locator("article").all():
        article.scroll_into_view_if_needed()
        for summary in article.locator(".fold summary:visible").all()[1:]:
            summary.click()
    opened.drawn()
    page.locator(".stored img").first.wait_for()
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    height = page.viewport_size["height"]
    for width in (page.viewport_size["width"], 320, 900, 1024):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.title() == "kvprobe: results and their provenance"
    assert NASTY in page.locator("#experiment-nasty .question").inner_text()


@pytest.mark.parametrize("settings", [WIDE, PHONE], ids=["wide", "phone"])
def test_what_is_folded_opens_by_its_link(browser: Any, address: str, settings: dict[str, Any]) -> None:
    opened = Opened(browser, address, unfolded=False, **settings)
    page = opened.page
    assert not page.locator(FIGURE).is_visible()
    assert not page.locator("#verdict-table").is_visible()
    page.locator("nav a[href='#verdicts']").click()
    assert page.locator("#verdict-table").is_visible()
    page.locator("#verdict-table a[href='#experiment-steady']").first.click()
    assert page.locator(FIGURE).is_visible()
    assert opened.drawn().is_visible()
    opened.context.close()
    # A link from elsewhere does the same.
    opened = Opened(browser, f"{address}#experiment-steady", unfolded=False, **settings)
    assert opened.drawn().is_visible()
    assert opened.said == []
    opened.context.close()


def test_filters_choose_what_they_say(opened: Opened, results: list[RunResult]) -> None:
    page = opened.page
    verdicts = [(section.name, verdict) for section in sections_of(results) for _, verdict in section.verdicts()]
    status = page.locator("#shown")

    def shown() -> int:
        # A form is empty only after its reset event, so the page filters a moment after the click.
        page.evaluate("new Promise((done) => setTimeout(done))")
        count = page.locator(SHOWN).count()
        assert status.inner_text() == f"{count} of {len(verdicts)} verdicts shown."
        return count

    assert shown() == len(verdicts)
    page.select_option("#filter-outcome", "fails")
    assert shown() == sum(str(verdict.outcome) == "fails" for _, verdict in verdicts) > 0
    assert set(page.locator(f"{SHOWN} .badge").all_inner_texts()) == {"✗ fails"}
    page.select_option("#filter-model", "blue")
    assert shown() == sum((str(v.outcome), v.model) == ("fails", "blue") for _, v in verdicts) > 0
    page.get_by_role("button", name="Show all").click()
    assert shown() == len(verdicts)
    page.select_option("#filter-section", "section4")
    assert shown() == sum(section == "section4" for section, _ in verdicts) > 0
    page.get_by_role("button", name="Show all").click()
    page.check("#filter-headline")
    assert shown() == sum(verdict.headline for _, verdict in verdicts) > 0
    page.get_by_role("button", name="Show all").click()
    page.fill("#filter-text", "NASTY downstream")
    assert shown() == 2
    page.fill("#filter-text", "nowhere to be found")
    assert shown() == 0


def test_columns_sort_by_value_and_back(opened: Opened) -> None:
    page = opened.page
    heading = page.get_by_role("columnheader", name="ours")
    cells = page.locator("#verdict-table tbody tr td:nth-child(5)")

    def values() -> list[float | None]:
        texts = cells.evaluate_all("(cells) => cells.map((cell) => cell.dataset.value)")
        return [float(text) if text else None for text in texts]

    first = values()
    known = [value for value in first if value is not None]
    assert None in first
    for direction, order in (("ascending", sorted(known)), ("descending", sorted(known, reverse=True))):
        heading.get_by_role("button").press("Enter")
        assert heading.get_attribute("aria-sort") == direction
        # What was not measured stands last in both directions.
        assert values() == [*order, *[None] * (len(first) - len(known))]
    heading.get_by_role("button").press("Enter")
    assert (heading.get_attribute("aria-sort"), values()) == ("none", first)
    page.get_by_role("columnheader", name="verdict").get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "none"


def test_enter_on_a_number_says_where_it_comes_from_and_escape_returns(
    opened: Opened, results: list[RunResult]
) -> None:
    page, result = opened.page, results[0]
    number = (
        page.locator("#verdict-table tr", has=page.get_by_role("link", name="steady"))
        .filter(has_text="blue")
        .locator(".number")
        .nth(1)
    )
    number.focus()
    page.keyboard.press("Enter")
    panel = page.get_by_role("dialog")
    panel.wait_for()
    assert page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
    effect = result.models["blue"].effect("downstream.recovery")
    assert panel.get_by_role("heading", level=2).inner_text() == "steady / blue / downstream.recovery"
    assert panel.locator(".value").inner_text() == interval(effect)
    text = panel.inner_text()
    for said in (result.hash, "blue-weights", "cluster t", "kvprobe explain steady/blue/downstream.recovery"):
        assert said in text
    assert f"{effect.n} included rows (condition is downstream); the first {ROWS_SHOWN}:" in text
    assert panel.locator(".rows tbody tr").count() == ROWS_SHOWN
    assert "fails" in text
    assert "downstream.recovery < 0.5" in text
    panel.get_by_text("The resolved YAML").click()
    assert (result.folder / "config.yaml").read_text().strip() == panel.locator("pre").inner_text().strip()
    page.keyboard.press("Escape")
    assert not panel.is_visible()
    assert number.evaluate("(button) => button === document.activeElement")


def test_a_figure_shows_every_effect_and_a_click_on_one_opens_its_panel(
    opened: Opened, results: list[RunResult]
) -> None:
    page, figure = opened.page, opened.drawn()
    drawn = figure.evaluate(
        "(figure) => figure.data.map((t) => [t.name, t.x, t.error_x && t.error_x.array, t.marker.color])"
    )
    *models, paper = drawn
    for (name, values, reach, _), model in zip(models, results[0].models.values(), strict=True):
        assert name == model.name
        assert values == pytest.approx([effect.estimate for effect in model.effects], rel=1e-5)
        assert reach == pytest.approx([effect.high - effect.estimate for effect in model.effects], abs=1e-5)
    assert [color for *_, color in models] == ["#0072B2", "#D55E00"]
    assert paper[:2] == ["the paper's value", [0.02, 0.02]]
    shaded = figure.evaluate("(figure) => figure.layout.shapes.filter((s) => s.type === 'rect').map((s) => s.x1)")
    assert {0.15, 0.075, 0.5} <= set(shaded)
    # The second effect of the second model.
    point = figure.locator(".scatterlayer .trace").nth(1).locator(".point").nth(1).bounding_box()
    page.mouse.move(point["x"] + 5, point["y"] + 5)
    page.locator(f"{FIGURE} .hovertext").wait_for()
    page.mouse.click(point["x"] + 5, point["y"] + 5)
    page.get_by_role("dialog").wait_for()
    assert page.get_by_role("dialog").locator("h2").inner_text() == "steady / blue / downstream.recovery"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "view-choice"


def test_a_figure_takes_no_more_room_when_it_is_drawn(opened: Opened) -> None:
    page = opened.page
    room = "(figures) => figures.map((figure) => figure.offsetHeight)"
    kept = page.locator(".figure").evaluate_all(room)
    page.evaluate("document.querySelector('article:last-of-type').scrollIntoView()")
    for figure in page.locator(".figure").all():
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for(state="attached")
    assert page.locator(".figure").evaluate_all(room) == kept


def test_the_numbers_of_a_figure_can_be_read_without_it(opened: Opened, results: list[RunResult]) -> None:
    page = opened.page
    choice = page.locator("#experiment-steady .view-choice")
    page.locator("#experiment-steady .numbers summary").press("Enter")
    for label in choice.locator("option").all_inner_texts():
        choice.select_option(label=label)
        buttons = page.locator("#experiment-steady .numbers button")
        shown = buttons.all_inner_texts()
        assert page.locator("#experiment-steady .numbers caption").inner_text() == label
        assert set(shown) <= {interval(effect) for model in results[0].models.values() for effect in model.effects}
        assert shown
    buttons.last.press("Enter")
    page.get_by_role("dialog").wait_for()
    assert page.get_by_role("dialog").locator(".value").inner_text() == shown[-1]


def test_every_control_is_reached_by_the_keyboard_and_shows_it(opened: Opened) -> None:
    page = opened.page
    kinds = "a[href], button, select, input, summary, [tabindex='0']"
    visible = page.evaluate(f"[...document.querySelectorAll({kinds!r})].filter((e) => e.checkVisibility()).length")
    seen = 0
    page.keyboard.press("Tab")
    while page.evaluate("document.activeElement !== document.body") and seen <= visible:
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
        seen += 1
        page.keyboard.press("Tab")
    assert seen == visible


SETTINGS = [
    pytest.param({**WIDE, "color_scheme": "light"}, id="light"),
    pytest.param({**WIDE, "color_scheme": "dark"}, id="dark", marks=pytest.mark.slow),
    pytest.param(PHONE, id="phone", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("opened", SETTINGS, indirect=True)
def test_axe_finds_nothing(opened: Opened) -> None:
    page = opened.page
    for article in page.locator("article").all():
        for summary in article.locator(".fold summary:visible").all()[1:]:
            summary.click()
    opened.drawn()
    page.locator("#verdict-table .number").first.click()
    page.locator("dialog summary").click()
    assert problems_of(page) == []
    # What is behind an open panel is hidden from readers, and from axe.
    page.keyboard.press("Escape")
    assert problems_of(page) == []


def test_figures_follow_the_readers_colours(opened: Opened) -> None:
    figure = opened.drawn()
    assert figure.evaluate("(figure) => figure._fullLayout.paper_bgcolor") == "#ffffff"
    opened.page.emulate_media(color_scheme="dark")
    for _ in range(100):
        drawn = figure.evaluate("(figure) => figure._fullLayout.paper_bgcolor")
        if drawn != "#ffffff":
            break
        opened.page.wait_for_timeout(50)
    assert drawn == "#14171b"
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
