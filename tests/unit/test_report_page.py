"""The report page holds every verdict and number, says where each comes from, loads nothing, and survives damage."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from page_fakes import NASTY, finished_runs, written_page
from plotly.graph_objs import Figure
from plotly.graph_objs.layout import Template
from typer.testing import CliRunner

from kvprobe.cli import look
from kvprobe.cli.app import app
from kvprobe.html.page.data import ROWS_SHOWN
from kvprobe.html.page.views import MOST_ROWS, regions_of, views_of
from kvprobe.html.page.write import write_page
from kvprobe.html.style import PALETTES
from kvprobe.report.counts import TITLES
from kvprobe.report.tables import interval
from kvprobe.runs import RunResult
from kvprobe.runs.claims import Claim, ClaimKind, Outcome
from kvprobe.runs.explain import explain
from kvprobe.runs.section import sections_of

assert look
CSS = (files("kvprobe.html") / "assets/page.css").read_text()
VERDICTS = [str(outcome).replace(" ", "-") for outcome in Outcome]


class Elements(HTMLParser):
    """All elements of a page with their attributes and the text directly in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs), []))

    def handle_data(self, data: str) -> None:
        if self.all:
            self.all[-1][2].append(data)

    def named(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.all if name == tag]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[RunResult]:
    return finished_runs(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def folder(results: list[RunResult]) -> Path:
    return results[0].folder.parents[1]


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    page = written_page(folder)
    assert page.path == folder / "report.html"
    assert page.failures == ()
    return page.path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def elements(html: str) -> Elements:
    return Elements(html)


def unpacked(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))


def data_of(elements: Elements) -> dict[str, dict[str, Any]]:
    """What the page's script reads of each experiment."""
    names = [attributes["data-experiment"] or "" for attributes, _ in elements.named("article")]
    texts = [text for attributes, text in elements.named("script") if attributes.get("class") == "data"]
    return {name: json.loads(unpacked(text)) for name, text in zip(names, texts, strict=True)}


def spelled_out(html: str) -> str:
    """The page with what is packed in it as text."""
    return re.sub(r'(?<=class="data">)[^<]+', lambda found: unpacked(found[0]).decode(), html)


FIELDS = ("name", "model", "text", "facts", "extra", "claims", "chosen", "rows")


def effects_of(experiment: dict[str, Any]) -> list[dict[str, Any]]:
    records = [dict(zip(FIELDS, values, strict=True)) for values in experiment["effects"]]
    return [record | dict(zip(experiment["facts"], record["facts"], strict=True)) for record in records]


def test_it_has_the_frame_that_a_reader_needs(elements: Elements) -> None:
    (html,) = elements.named("html")
    assert html[0]["lang"] == "en"
    assert [text.strip() for _, text in elements.named("title")] == ["kvprobe: results and their provenance"]
    for landmark in ("header", "nav", "main", "footer"):
        assert len(elements.named(landmark)) == 1
    assert all(attributes.get("scope") in ("col", "row") for attributes, _ in elements.named("th"))
    sorted_by = [attributes["aria-sort"] for attributes, _ in elements.named("th") if "aria-sort" in attributes]
    assert sorted_by == ["none"] * 7
    assert len(elements.named("dialog")) == 1
    ids = [attributes["id"] for _, attributes, _ in elements.all if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes, _ in elements.all:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)
    targets = [attributes["href"] or "" for attributes, _ in elements.named("a")]
    assert {target[1:] for target in targets} <= set(ids)
    assert {"#experiment-steady", "#experiment-nasty", "#experiment-wild"} <= set(targets)


def test_nothing_is_loaded_from_anywhere(elements: Elements) -> None:
    for tag, attributes, _ in elements.all:
        assert "src" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert tag not in ("iframe", "object", "embed", "base")
        if tag == "link":
            assert attributes["href"] == "data:,"
    (policy,) = (a["content"] or "" for a, _ in elements.named("meta") if "content-security" in str(a).lower())
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert "url(" not in CSS
    assert "@import" not in CSS


def test_what_runs_say_stays_text(elements: Elements, html: str) -> None:
    assert "onerror=&#34;alert" in html
    assert escape(NASTY) in html
    assert "<img" not in html
    assert "<script>document" not in html
    told = Elements(
        "".join(claim["html"] for effect in effects_of(data_of(elements)["nasty"]) for claim in effect["claims"])
    )
    assert {tag for tag, _, _ in told.all} == {"h3", "p", "code", "span", "dl", "dt", "dd"}
    assert NASTY in "".join("".join(text) for _, _, text in told.all)
    kinds = [
        (attributes.get("type"), attributes.get("id") or attributes.get("class"))
        for attributes, _ in elements.named("script")
    ]
    assert Counter(kinds) == {
        ("application/json", "themes"): 1,
        ("text/plain", "plotly"): 1,
        ("text/plain", "data"): 3,
        ("text/plain", None): 2,  # two stored figures
        (None, None): 1,
    }


def test_every_number_of_every_run_is_there_with_its_own_rows(results: list[RunResult], elements: Elements) -> None:
    shown = data_of(elements)
    for result in results:
        experiment = shown[result.config.name]
        effects = effects_of(experiment)
        rows = result.rows()
        measured = [(model, effect) for model in result.models.values() for effect in model.effects]
        assert len(effects) == len(measured) > 0
        columns = experiment["rows"]["columns"]
        for record, (model, effect) in zip(effects, measured, strict=True):
            assert (record["name"], experiment["models"][record["model"]]["name"]) == (effect.name, model.name)
            assert record["text"] == interval(effect)
            assert (record["n"], record["excluded"]) == (effect.n, effect.excluded)
            assert record["clusters"].split()[0] == str(effect.clusters)
            condition = effect.name.removesuffix(".recovery")
            own = rows[(rows["model"] == model.name) & rows["included"] & (rows["condition"] == condition)]
            assert record["chosen"].startswith(f"{effect.n} included rows (condition is {condition});")
            assert len(own) == effect.n
            kept = [dict(zip(columns, experiment["rows"]["cells"][place], strict=True)) for place in record["rows"]]
            assert len(kept) == min(ROWS_SHOWN, len(own))
            assert [row["margin"] for row in kept] == pytest.approx(list(own["margin"].head(ROWS_SHOWN)), rel=1e-5)
            assert {row["condition"] for row in kept} == {condition}
        for model in result.models.values():
            (told,) = (each for each in experiment["models"] if each["name"] == model.name)
            assert all(str(escape(str(value))) in told["about"] for value in model.identity.values())
        for part in (result.hash, escape((result.folder / "config.yaml").read_text()), "kvprobe 0, commit c"):
            assert str(part) in experiment["origin"]


def test_charts_are_plotly_figures_of_every_effect(results: list[RunResult], elements: Elements) -> None:
    shown = data_of(elements)
    for result in results:
        experiment, found = shown[result.config.name], set()
        for chart in experiment["charts"]:
            # Plotly checks every name and value.
            figure = Figure(chart["figure"])
            assert figure.layout.template.to_plotly_json() == Figure().layout.template.to_plotly_json()
            *models, paper = figure.data
            for model, trace in zip(result.models.values(), models, strict=True):
                effects = [effects_of(experiment)[place] for place in trace.customdata]
                own = [model.effect(effect["name"]) for effect in effects]
                assert list(trace.x) == pytest.approx([effect.estimate for effect in own], rel=1e-5)
                assert list(trace.error_x.array) == pytest.approx([e.high - e.estimate for e in own], abs=1e-5)
                assert list(trace.error_x.arrayminus) == pytest.approx([e.estimate - e.low for e in own], abs=1e-5)
                assert [symbol.endswith("-open") for symbol in trace.marker.symbol] == [e.is_range for e in own]
                found |= set(trace.customdata)
            given = {verdict.paper_value for verdict in result.verdicts} - {None}
            assert set(paper.x) <= given
        assert found == set(range(len(experiment["effects"])))


def test_themes_are_plotly_templates(elements: Elements) -> None:
    (text,) = (text for attributes, text in elements.named("script") if attributes.get("id") == "themes")
    themes = json.loads(text)
    assert set(themes) == {"light", "dark"}
    for name, theme in themes.items():
        assert Template(theme).layout.paper_bgcolor == PALETTES[name]["ground"]


def test_every_verdict_has_a_line_and_the_counts_add_up(results: list[RunResult], elements: Elements) -> None:
    verdicts = [(s.name, v) for s in sections_of(results) for _, v in s.verdicts()]
    verdicts.sort(key=lambda told: list(TITLES).index(told[1].kind))
    lines = [attributes for attributes, _ in elements.named("tr") if "data-outcome" in attributes]
    told = [(line["data-section"], line["data-model"], line["data-outcome"]) for line in lines]
    assert told == [(section, v.model, str(v.outcome)) for section, v in verdicts]
    assert {"holds", "fails", "not applicable"} <= {outcome for _, _, outcome in told}
    counts = Counter(str(v.outcome) for _, v in verdicts if v.kind is not ClaimKind.IDENTITY and not v.shown_in)
    assert sum(counts.values()) < len(verdicts)
    tiles = [text.strip() for attributes, text in elements.named("dd") if attributes.get("class") == "count"]
    assert tiles == [str(counts[str(outcome)]) for outcome in Outcome]
    numbers = [attributes for attributes, _ in elements.named("button") if "data-effect" in attributes]
    assert len(numbers) == sum(v.effect is not None for _, v in verdicts)
    shown = data_of(elements)
    named = [shown[n["data-experiment"] or ""]["effects"][int(n["data-effect"] or 0)][0] for n in numbers]
    assert named == [v.effect.name for _, v in verdicts if v.effect]


def test_all_verdicts_weigh_the_same_and_are_told_by_words(elements: Elements) -> None:
    sizes = {kind: set(re.findall(rf"\.{kind} {{([^}}]*)}}", CSS)) for kind in VERDICTS}
    plain = {kind: {rule.replace(kind, "kind") for rule in rules} for kind, rules in sizes.items()}
    assert len({frozenset(rules) for rules in plain.values()}) == 1
    assert [len(rules) for rules in plain.values()] == [1] * len(VERDICTS)
    badges = "".join("".join(text) for tag, attributes, text in elements.all if tag == "span")
    assert all(str(outcome) in badges for outcome in (Outcome.HOLDS, Outcome.FAILS))


def test_the_same_results_give_the_same_bytes(folder: Path, html: str, tmp_path: Path) -> None:
    assert written_page(folder).path.read_text(encoding="utf-8") == html
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    again = written_page(moved).path.read_text(encoding="utf-8")
    assert spelled_out(again).replace(str(moved), str(folder)) == spelled_out(html)


def test_the_stored_figure_is_in_it_whole(results: list[RunResult], elements: Elements) -> None:
    packed = [text for attributes, text in elements.named("script") if attributes == {"type": "text/plain"}]
    stored = [result.folder / f"{result.config.name}.svg" for result in results]
    assert [unpacked(text) for text in packed] == [file.read_bytes() for file in stored if file.exists()]
    said = "".join(text for _, text in elements.named("p"))
    assert "The figure nasty.svg is missing; `kvprobe report` draws it." in said


def test_damage_leaves_a_sentence_and_the_rest(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (steady,), (nasty,), (wild,) = (list((damaged / name).iterdir()) for name in ("steady", "nasty", "wild"))
    (steady / "summary.json").write_text("{")
    (nasty / "rows.parquet").write_bytes(b"no rows")
    (wild / "summary.json").unlink()
    done = CliRunner().invoke(app, ["report", "--page-only", str(damaged)])
    assert done.exit_code == 1
    assert done.stdout.split() == [str(damaged / "report.html")]
    elements = Elements((damaged / "report.html").read_text(encoding="utf-8"))
    told = "".join("".join(text) for _, _, text in elements.all)
    assert f"{steady / 'summary.json'} is damaged" in told
    assert "No run has finished yet" in told
    assert "rows.parquet cannot be read" in told
    experiment = data_of(elements)["nasty"]
    assert [effect["rows"] for effect in effects_of(experiment)] == [[]] * len(experiment["effects"])
    assert {effect["chosen"] for effect in effects_of(experiment)} == {"The run's rows could not be read."}
    (nasty / "summary.json").write_text("[]")
    done = CliRunner().invoke(app, ["report", "--page-only", str(damaged)])
    assert done.exit_code == 1
    assert (damaged / "report.html").read_text(encoding="utf-8").count("is damaged") >= 2


def test_an_experiment_that_cannot_be_shown_keeps_its_verdicts(
    results: list[RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(result: RunResult) -> None:
        if result.config.name == "steady":
            raise RuntimeError("out of luck")
        return views_of(result)

    monkeypatch.setattr("kvprobe.html.page.data.views_of", fail)
    copy = tmp_path / "results"
    shutil.copytree(results[0].folder.parents[1], copy)
    page = written_page(copy)
    assert [(f.experiment, f.message) for f in page.failures] == [("steady", "RuntimeError: out of luck")]
    html = page.path.read_text(encoding="utf-8")
    assert "RuntimeError: out of luck" in html
    assert html.count("data-outcome=") == sum(len(result.verdicts) for result in results)
    assert 'href="#experiment-steady"' not in html


def test_the_command_names_the_page(results: list[RunResult], folder: Path) -> None:
    for place, names in ((folder, {"steady", "nasty", "wild"}), (results[0].folder, {"steady"})):
        done = CliRunner().invoke(app, ["report", str(place), "--page-only"])
        assert (done.exit_code, done.stdout) == (0, f"{place / 'report.html'}\n")
        assert data_of(Elements((place / "report.html").read_text(encoding="utf-8"))).keys() == names
    (results[0].folder / "report.html").unlink()


def test_a_page_of_nothing_can_be_written(tmp_path: Path) -> None:
    assert "0 of 0 verdicts" in write_page([], tmp_path).path.read_text(encoding="utf-8")


def test_every_effect_can_be_seen_in_one_unit_at_a_time(results: list[RunResult]) -> None:
    for result in results:
        units = {effect.name: effect.unit for model in result.models.values() for effect in model.effects}
        views = views_of(result)
        assert {name for view in views for name in view.effects} == set(units)
        for view in views:
            assert len(view.effects) <= MOST_ROWS
            assert {units[name] for name in view.effects} == {view.unit}
        claimed = {claim.parsed.effect for claim in result.config.claims} & set(units)
        assert set(views[0].effects) <= claimed


@pytest.mark.parametrize(
    "statement",
    ["x < 0.5", "x > 0.5", "abs(x) < 0.5", "abs(x) >= 0.5", "0.2 <= x <= 0.6", "0.2 < abs(x) < 0.6", "x == 0"],
)
def test_the_shaded_region_is_where_the_claim_holds(statement: str) -> None:
    claim = Claim(id="c", statement=statement)
    regions = [(-math.inf if a is None else a, math.inf if b is None else b) for a, b in regions_of(claim)]
    for value in (step / 100 - 1.005 for step in range(202)):
        quantity = abs(value) if claim.parsed.absolute else value
        assert any(a < value < b for a, b in regions) == claim.parsed.contains(quantity, quantity)
    if statement == "x == 0":
        assert regions == [(0, 0)]


def test_explain_shows_the_rows_of_each_models_own_effect(results: list[RunResult], folder: Path) -> None:
    about = explain("steady/rest", folder)
    assert set(about.effects) == {"red", "blue"}
    assert set(about.rows["condition"]) == {"downstream"}
    assert len(about.rows) == sum(effect.n for effect in about.effects.values())


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(dark: bool) -> None:
    """Of WCAG 2.2: 4.5 to 1 for text, 3 to 1 for the edges of controls and the focus."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    colour = PALETTES["dark" if dark else "light"]
    assert PALETTES["dark"].keys() == PALETTES["light"].keys()
    for ink, ground in product(("ink", "muted", "link"), ("ground", "raised")):
        assert contrast(colour[ink], colour[ground]) >= 4.5, (ink, ground)
    for kind in (*VERDICTS, "problem"):
        assert contrast(colour[f"{kind}-ink"], colour[f"{kind}-tint"]) >= 4.5, kind
    for edge in ("muted", "focus"):
        assert contrast(colour[edge], colour["ground"]) >= 3, edge


def test_nothing_moves_by_itself() -> None:
    assert not re.search(r"transition|animation|scroll-behavior: smooth|@keyframes", CSS)
