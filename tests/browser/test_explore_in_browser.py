"""The explore page in a real browser: by mouse, keyboard and finger; errors, links and files; it fetches nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import PHONE, WIDE, problems_of

from kvprobe import auditing
from kvprobe.explore import Session, State, read_state
from kvprobe.models.loader import load_subject
from kvprobe.tasks.own_prompt import read_prompt_file

server = pytest.importorskip("kvprobe.explore.server", reason="starlette and uvicorn are not installed")
EXAMPLE = Path(auditing.__file__).parent / "example.yaml"
FIELD, LATER = 14, [27, 38]
"""Where the example's field stands, and the two full stops that the micro-model takes notes at."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    session = Session(load_subject("micro-note-taker", device="cpu"))
    page = server.Server(session, State(prompt=read_prompt_file(EXAMPLE)))
    thread = threading.Thread(target=page.run)
    thread.start()
    yield page.url
    page.stop()
    thread.join()


class Reader:
    """Somebody at the page."""

    def __init__(self, browser: Any, url: str, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.settled()

    def settled(self) -> None:
        self.page.locator("#keep:enabled").wait_for()

    def token(self, place: int) -> Any:
        return self.page.locator(f"#token-{place}")

    @property
    def chosen(self) -> list[int]:
        self.settled()
        found = self.page.locator("[role=option][aria-selected=true]").all()
        return [int(token.get_attribute("id").removeprefix("token-")) for token in found]

    def bar(self, kind: str, within: str = "#now") -> str:
        self.settled()
        return self.page.locator(f"{within} [data-kind={kind}] .told").inner_text()


@pytest.fixture
def reader(browser: Any, url: str, request: pytest.FixtureRequest) -> Iterator[Reader]:
    found = Reader(browser, url, **getattr(request, "param", WIDE))
    yield found
    assert found.said == []
    assert {
        asked.partition("#")[0].replace("/show", "/") for asked in found.asked if asked[:5] not in ("data:", "blob:")
    } == {url}
    found.context.close()


def test_the_finding_by_mouse(reader: Reader) -> None:
    page = reader.page
    assert reader.chosen == [FIELD]
    assert reader.bar("old").startswith("inspect")
    assert reader.bar("new").startswith("release")
    assert "recovery 0.00" in reader.bar("transplant")
    page.get_by_role("button", name="the strongest 8").click()
    assert reader.chosen == LATER
    assert reader.bar("transplant").startswith("release")
    assert "recovery 1.00" in reader.bar("transplant")
    page.get_by_role("button", name="none").click()
    # Tokens move while an answer is written into the page.
    assert reader.bar("old").startswith("inspect")
    page.wait_for_load_state("networkidle")
    reader.token(3).hover()
    page.mouse.down()
    reader.token(6).hover()
    page.mouse.up()
    assert reader.chosen == [3, 4, 5, 6]
    reader.token(4).click()
    assert reader.chosen == [3, 5, 6]
    reader.token(8).click(modifiers=["Shift"])
    assert reader.chosen == [4, 5, 6, 7, 8]
    assert "recovery 0.00" in reader.bar("transplant")
    # What has no cache entry cannot be chosen.
    page.locator("[aria-disabled=true]").click(force=True)
    assert len(reader.chosen) == 5


def test_parts_layers_and_methods(reader: Reader) -> None:
    page = reader.page
    page.get_by_role("button", name="all after it").click()
    whole = reader.bar("transplant")
    page.get_by_label("keys alone").check()
    reader.settled()
    assert "keys, all layers" in page.locator("#chosen").inner_text()
    assert reader.bar("transplant") != whole
    page.get_by_label("keys and values").check()
    page.locator("#last").fill("0")
    reader.settled()
    assert "layers 0" in page.locator("#chosen").inner_text()
    page.select_option("#method", "field_only")
    assert "recovery 0.00" in reader.bar("edit")
    page.select_option("#method", "full_downstream")
    assert "recovery 1.00" in reader.bar("edit")
    page.locator("#edit summary").click()
    assert "domestic" in page.locator("#edit .mark").first.inner_text()
    assert "the parcel origin is now domestic" in page.locator(".erratum").inner_text()


def test_all_of_it_by_keyboard(reader: Reader) -> None:
    page = reader.page
    page.locator("[role=listbox]").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert reader.chosen == [0, 1, 2]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    assert reader.chosen == [0, 1, 2, 3]
    top = reader.token(3).bounding_box()["y"]
    page.keyboard.press("ArrowDown")
    active = page.locator("[role=listbox]").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").bounding_box()["y"] > top + 5
    page.keyboard.press("ArrowUp")
    active = page.locator("[role=listbox]").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").bounding_box()["y"] == pytest.approx(top, abs=2)
    page.keyboard.press("Escape")
    assert reader.chosen == []
    page.keyboard.press("Control+a")
    assert "recovery 1.00" in reader.bar("transplant")


@pytest.mark.parametrize("reader", [PHONE], indirect=True, ids=["phone"])
def test_by_finger_and_nothing_is_wider_than_a_phone(reader: Reader) -> None:
    for place in LATER:
        reader.token(place).tap()
        reader.settled()
    assert reader.chosen == [FIELD, *LATER]
    assert "recovery 1.00" in reader.bar("transplant")
    reader.page.get_by_role("button", name="Keep this state beside").tap()
    reader.settled()
    for width in (390, 320, 768):
        reader.page.set_viewport_size({"width": width, "height": 844})
        assert reader.page.evaluate("document.documentElement.scrollWidth") <= width


def test_values_prompts_and_what_is_wrong_with_them(reader: Reader) -> None:
    page = reader.page
    page.fill("#value", "foreign")
    page.keyboard.press("Enter")
    page.locator("#problem:visible").wait_for()
    assert "needs two different values" in page.locator("#problem").inner_text()
    page.fill("#value", "domestic")
    page.keyboard.press("Enter")
    reader.settled()
    assert not page.locator("#problem").is_visible()
    page.get_by_text("The prompt file").click()
    text = page.input_value("#prompt")
    page.fill("#prompt", text.replace("{{foreign|domestic}}", "foreign"))
    page.get_by_role("button", name="Use this prompt").click()
    page.locator("#problem:visible").wait_for()
    page.get_by_text("0 marks were found").wait_for()
    page.fill(
        "#prompt",
        text.replace("{{foreign|domestic}}", "{{domestic|foreign}}")
        .replace("old: inspect", "old: release")
        .replace("new: release", "new: inspect"),
    )
    page.get_by_role("button", name="Use this prompt").click()
    reader.settled()
    assert reader.bar("old").startswith("release")
    assert page.input_value("#value") == "foreign"


def test_two_states_beside_each_other_in_a_link_and_a_file(
    reader: Reader, browser: Any, url: str, tmp_path: Path
) -> None:
    page = reader.page
    page.get_by_role("button", name="Keep this state beside").click()
    page.get_by_role("button", name="the strongest 8").click()
    assert "recovery 0.00" in reader.bar("transplant", "#kept")
    assert "recovery 1.00" in reader.bar("transplant")
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save as a file").click()
    file = tmp_path / saved.value.suggested_filename
    saved.value.save_as(file)
    assert file.name == "customs.json"
    assert read_state(file.read_text(), "").choice.positions == tuple(LATER)
    assert read_prompt_file(file).prompt == read_prompt_file(EXAMPLE).prompt
    link = page.get_by_role("link", name="Link to this state").evaluate("link => link.href")
    other = Reader(browser, link, **WIDE)
    other.page.locator("#kept:visible").wait_for()
    assert other.chosen == LATER
    assert "recovery 0.00" in other.bar("transplant", "#kept")
    other.page.get_by_role("button", name="Drop").click()
    other.settled()
    assert not other.page.locator("#kept").is_visible()
    page.get_by_role("button", name="none").click()
    reader.settled()
    content = json.loads(file.read_text())
    del content["explore"]["kept"]
    file.write_text(json.dumps(content))
    page.set_input_files("#open", file)
    page.locator("#now .chosen").nth(1).wait_for()
    assert reader.chosen == LATER
    assert other.said == []
    other.context.close()


@pytest.mark.parametrize("reader", [WIDE, {**WIDE, "color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_axe_finds_nothing(reader: Reader) -> None:
    reader.page.get_by_role("button", name="Keep this state beside").click()
    for summary in reader.page.locator("summary").all():
        summary.click()
    reader.settled()
    assert problems_of(reader.page) == []
