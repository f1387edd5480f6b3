"""What code, experiments and documentation cite of the protocol and of the critique stands in docs/reference."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvprobe", "experiments", "configs", "docs", "benchmarks", "tests")
TEXT = {".py", ".md", ".yaml", ".toml", ".jinja"}
LABEL = re.compile(r"\b(?:G|ME|CI|ED|CO|KS|UA|HZ|MM|MU|SV)\d{1,2}\b")
NUMBER = re.compile(r"\bprotocol (\d+(?:\.\d+)?)")


def texts() -> list[tuple[str, str]]:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in TEXT]
    return [(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in files]


def listed(page: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_cited_label_of_the_critique_is_explained() -> None:
    cited = {(name, label) for name, text in texts() for label in LABEL.findall(text) if "critique" in text}
    known = listed("critique.md", r"^\| ([A-Z]+\d+) \|")
    assert len(cited) > 50
    assert {(name, label) for name, label in cited if label not in known} == set()


def test_every_cited_number_of_the_protocol_is_explained() -> None:
    cited = {(name, number) for name, text in texts() for number in NUMBER.findall(text)}
    known = listed("protocol.md", r"^\| (\d+(?:\.\d+)?) \|") | listed("protocol.md", r"^## (\d+) ")
    assert len(cited) > 40
    assert {(name, number) for name, number in cited if number not in known} == set()
