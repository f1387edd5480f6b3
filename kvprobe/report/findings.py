"""What was found, said first: one sentence a probe and model, with numbers and intervals."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from kvprobe.errors import UnknownNameError
from kvprobe.probes.base import Reading
from kvprobe.report.tables import short
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.results import ModelResult, RunResult
from kvprobe.stats import Effect

TITLE = "What was found"
_NUMBER = re.compile(r"\{([\w.]+)\}")


def findings(results: Sequence[RunResult]) -> dict[str, list[str]]:
    """Sentences by model, in the order of the argument; those of a probe that states none are left out.

    A sentence names what was measured and gives the numbers; it is the same whatever they are.
    """
    said: dict[str, list[str]] = {}
    told: dict[str, tuple[Reading, RunResult]] = {}
    for result in results:
        told.setdefault(result.config.probe, (make_probe(result.config).read_by(), result))
    for reading, result in sorted(told.values(), key=lambda pair: pair[0].step):
        if not (text := reading.finding):
            continue
        for model in result.models.values():
            if (sentence := _sentence(text, model)) is not None:
                said.setdefault(short(model.name), []).append(sentence)
    return said


def findings_text(results: Sequence[RunResult]) -> Text:
    """The findings for a terminal; empty where there are none."""
    parts: list[str | tuple[str, str]] = []
    for model, sentences in findings(results).items():
        parts += ["\n", (model, "bold"), *(f"\n  {sentence}" for sentence in sentences)]
    return Text.assemble("\n", (TITLE, "bold underline"), *parts) if parts else Text()


def findings_markdown(results: Sequence[RunResult]) -> str:
    """The findings as a list; empty where there are none."""
    lines = [f"- **{model}**: {' '.join(sentences)}" for model, sentences in findings(results).items()]
    return "\n".join([f"## {TITLE}", "", *lines]) if lines else ""


def _sentence(text: str, model: ModelResult) -> str | None:
    if not model.effects:
        return None
    try:
        return _NUMBER.sub(lambda name: _number(model.effect(name[1])), text)
    except UnknownNameError:
        # A smaller profile leaves some sizes out.
        return None


def _number(effect: Effect) -> str:
    """`0.034 [-0.012, 0.081]`: in a sentence, a power of ten says no more than 0.000 does."""
    digits = 3 if abs(effect.high) < 10 else 1
    # Adding 0 takes the sign from a zero.
    estimate, low, high = (f"{round(end, digits) + 0:.{digits}f}" for end in (effect.estimate, effect.low, effect.high))
    return f"{estimate} [{low}, {high}]"
