"""What commands print: the text itself, and no control character of it."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from kvprobe.cli.terminal import Terminal
from kvprobe.html.templating import render
from kvprobe.report.tables import plain_table
from kvprobe.viewing import visible

TEXTS = st.text(
    st.sampled_from("a[]/\\:(){}<&'\"\x00\x07\x1b\x7f\x85\x9b\u202e\ud800\r\b") | st.characters(), max_size=30
)
CONTROLS = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))} - {"\n", "\t"}


@settings(deadline=None)
@given(TEXTS)
def test_text_is_printed_as_it_is_but_for_control_characters(text: str) -> None:
    for printed in (text, Text(text, "bold"), plain_table(text, [text], [[text]])):
        out = io.StringIO()
        Terminal(file=out, width=200).print(printed, soft_wrap=True)
        assert not CONTROLS & set(out.getvalue())
        out.getvalue().encode()
    shown = "".join(visible(text).split())
    assert len(visible(text)) == len(text)
    out = io.StringIO()
    Terminal(file=out, width=10_000).print(visible(text), soft_wrap=True)
    assert "".join(out.getvalue().split()) == shown


def test_markup_is_text() -> None:
    for text in ("[/INST]", "runs[v2]", "[bold]x[/]", ":smile:"):
        out = io.StringIO()
        Terminal(file=out).print(text)
        assert out.getvalue() == f"{text}\n"


@settings(deadline=None)
@given(TEXTS)
def test_no_control_character_reaches_a_page(text: str) -> None:
    assert not CONTROLS & set(render("page/facts", pairs=[("name", text)]))
