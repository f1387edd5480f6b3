"""The documentation says what is so: its code runs, its commands exist, its lists are complete, its site needs no net."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from blocks import LANGUAGES, ROOT, check_skipped, generator, run

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Its commands install, or run whole sections.
README = ROOT / "README.md"
FENCE = re.compile(r"^[ \t]*```(?P<language>[\w-]*)(?P<rest>.*)$", re.MULTILINE)
SKIP = re.compile(r"^<!--+\s*skip:(?P<what>.*?)--+>", re.MULTILINE)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_of_a_page_runs(page: Path, page_folder: Path) -> None:
    run(page)


def test_python_and_yaml_of_the_readme_run_and_its_commands_exist(page_folder: Path) -> None:
    run(README, commands=False)


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md"], ids=named)
def test_commands_for_contributors_exist(page: Path, page_folder: Path) -> None:
    run(page)


@pytest.mark.parametrize("page", [*PAGES, README, ROOT / "CONTRIBUTING.md"], ids=named)
def test_every_block_says_what_it_is_and_every_skip_says_why(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    opening = FENCE.findall(text)[::2]
    odd = [language + rest for language, rest in opening if language not in (*LANGUAGES, "text") or rest.strip()]
    assert not odd, f"blocks that no test runs: {odd}"
    for what in SKIP.findall(text):
        assert re.fullmatch(r'\s*next\s+"[^"]{10,}"\s*', what), f"skip:{what}"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("make no-such-target", "no target"),
        ("kvprobe no-such-command", "no command"),
        ("kvprobe run x.yaml --no-such-option 3", "no option"),
        ("pip install -e '.[no-such-extra]'", "no extra"),
    ],
)
def test_commands_that_do_not_exist_are_found(text: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_skipped(text)


def test_a_block_that_fails_fails_with_its_place(
    tmp_path: Path, page_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(page)
    assert caught.value.__notes__ == ["in the block that begins on line 7 of page.md"]
    assert caught.traceback[-1].lineno == 7


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    generator().complete(navigation)
    listed = re.findall(r"[\w/.]+\.md", repr(navigation))
    written = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert sorted(listed) == sorted(
        written | {path for path, _ in generator().generated_pages() if path.endswith(".md")}
    )


def test_every_public_module_has_a_docstring_and_is_in_the_reference() -> None:
    made = {path: str(content) for path, content in generator().generated_pages() if path.startswith("reference/")}
    described = set(re.findall(r"^::: ([\w.]+)$", "\n".join(made.values()), flags=re.MULTILINE))
    for file in sorted((ROOT / "kvprobe").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), f"{file} has no docstring"
        if (
            name != "kvprobe"
            and not name.startswith("kvprobe.cli")
            and not any(p.startswith("_") for p in name.split("."))
        ):
            assert name in described, f"{name} is not in the reference"


@pytest.mark.parametrize("kind", ["Probes", "Tasks", "Edit methods", "Selection criteria", "Reuse schemes", "Agents"])
def test_lists_name_everything_that_is_registered(kind: str) -> None:
    module, attribute = generator().REGISTRIES[kind]
    page = generator().names_page()
    section = page.split(f"## {kind}\n")[1].split("\n## ")[0]
    registered = getattr(importlib.import_module(module), attribute).describe()
    assert set(re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)) == set(registered)
    assert all(registered.values())


@pytest.mark.parametrize(
    ("page", "module", "attribute"),
    [
        ("concepts/editing.md", "kvprobe.edit.base", "EDIT_METHODS"),
        ("concepts/composing.md", "kvprobe.composing.base", "REUSE_SCHEMES"),
    ],
)
def test_concept_pages_explain_every_method(page: str, module: str, attribute: str) -> None:
    table = re.findall(r"^\| `([^`]+)` \|", (DOCS / page).read_text(), flags=re.MULTILINE)
    assert set(getattr(importlib.import_module(module), attribute).names()) <= set(table)


def test_the_method_page_counts_as_the_released_results_do() -> None:
    told = (DOCS / "method.md").read_text()
    word = re.compile(r"(\d+)\s+(?:are\s+|is\s+)?(hold|fail|open|need)")
    for line in (ROOT / "results/released/README.md").read_text().splitlines():
        if (section := re.match(r"\| \[section(\d)\]", line)) is None:
            continue
        said = re.search(rf"(?:out\*\* \(|\. )S{section[1]}[;:] (.*?)(?: S6:|\)\.\n)", told, re.DOTALL)[1]  # type: ignore[index]
        *kinds, checks = line.split(" | ")[1:]
        assert word.findall(said) == [pair for kind in kinds for pair in word.findall(kind)], section[0]
        assert re.search(r"all (\d+)\s+checks pass", said)[1] == checks.split(" ")[0]  # type: ignore[index]


def test_the_method_page_names_every_experiment() -> None:
    text = (DOCS / "method.md").read_text()
    experiments = {file.stem for file in (ROOT / "experiments").glob("section[3456]/*.yaml")}
    assert {name for name in experiments if f"`{name}`" not in text} == set()


def test_every_key_of_an_experiment_is_explained() -> None:
    from kvprobe.runs.claims import Claim
    from kvprobe.runs.config import ExperimentConfig, GateConfig
    from kvprobe.stats import StatisticsConfig

    text = (DOCS / "howto/experiments.md").read_text()
    for schema in (ExperimentConfig, GateConfig, StatisticsConfig, Claim):
        missing = [key for key in schema.model_fields if f"`{key}`" not in text]
        assert not missing, f"{schema.__name__}: {missing}"


def test_every_key_of_a_model_file_is_explained() -> None:
    from kvprobe.models.config import ModelConfig

    text = (DOCS / "howto/own_model.md").read_text()
    assert [key for key in ModelConfig.model_fields if f"`{key}`" not in text] == []


def test_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(DOCS / "pictures/draw.py"))
    for name, draw in drawn["PICTURES"].items():
        for scheme, colours in drawn["SCHEMES"].items():
            file = f"{name}-{scheme}.svg"
            draw(colours).save(tmp_path / file)
            assert (tmp_path / file).read_bytes() == (DOCS / "pictures" / file).read_bytes(), f"draw {file} again"


class Loads(HTMLParser):
    """Addresses that a browser fetches when it shows a page: no links, which wait for a click."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(values.get("href") or "")
        if tag in ("script", "img", "iframe", "source", "video", "audio"):
            self.addresses.append(values.get("src") or "")


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs, of the extra docs, is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        parser = Loads()
        parser.feed(page.read_text(encoding="utf-8"))
        outside = [address for address in parser.addresses if re.match(r"(?:[a-z]+:)?//", address)]
        assert not outside, f"{page.name} fetches {outside}"
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
