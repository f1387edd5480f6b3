"""Header and seam (protocol 6.2 seam_repair, critique CO1): does a repaired seam make up for a missing attention sink?

The rule, and the notes behind it where they are one chunk with it, are compiled behind each header and put into the
prompt with their first b tokens run in place: every header with every b. One prompt of each pair is composed, the
base's and the donor's in turn.

    none      nothing: the chunk's first token becomes a sink of its own
    bos       the beginning of a text
    neutral   the beginning of a text, if there is one, and a line that says nothing
    real      what stands before the chunk here

The chunk's first token is read as an attention sink in each of these caches (b = 0), behind no header with one token
repaired (`none_repaired`), and in the full prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, get_args

from pydantic import Field, field_validator

from kvprobe.composing.base import Composed, make_scheme
from kvprobe.composing.chunk import Header, beginning_of_text
from kvprobe.composing.prompts import compile_segment, composition_of, merged
from kvprobe.composing.sinks import read_sink
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.readout import read
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.fidelity import FULL_PREFILL, decide_behind, reference_of
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

HEADERS: tuple[Header, ...] = get_args(Header)
REPAIRED = "none_repaired"
SINK = ("key_norm", "value_norm", "attention", "attention_elsewhere", "attention_on_start")
"""What is read of the first token."""
_CHUNK = "chunk"


@PROBES.register("seam_repair")
class SeamRepair(Probe):
    """Every header with every length of repaired seam, and the chunk's first token as an attention sink."""

    seams: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 1, 2, 4, 8, 16), min_length=2, description="first tokens of the chunk that are run; with 0 and 1"
    )
    chunk: tuple[str, ...] = Field(("policy",), min_length=1, description="neighbouring segments, in order")

    @field_validator("seams")
    @classmethod
    def _has_both_that_are_compared(cls, seams: tuple[int, ...]) -> tuple[int, ...]:
        if not {0, 1} <= set(seams):
            raise ValueError("seams of 0 and 1 tokens are compared with; put both in")
        return seams

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each header and seam, and one for each reading of the first token.

        Raises:
            ConfigError: a pair has not the chunk's segments, one after the other.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            case = _Case(subject, pair, self.chunk, donor=bool(index % 2))
            made = (*case.cells(self.seams), *case.sinks())
            rows += [{"pair": index, **case.gate, "prompt": case.side, **row} for row in made]
            progress(index + 1, len(pairs))
        return rows


class _Case:
    """One prompt of a pair with its chunk, its reference and what the gate reads."""

    def __init__(self, subject: Subject, pair: Pair, segments: Sequence[str], *, donor: bool) -> None:
        self.subject, self.side = subject, "donor" if donor else "base"
        ours, other = (pair.donor, pair.base) if donor else (pair.base, pair.donor)
        self.prompt = merged(ours, _CHUNK, segments)
        answers = pair.base_answer_id, pair.donor_answer_id
        whole = prefill(subject, ours.token_ids)
        self.cache = whole.cache
        self.reference = reference_of(subject, pair, donor=donor, logits=whole.logits)
        theirs = read(prefill(subject, other.token_ids).logits, *answers)
        again = forward(subject, ours.token_ids[-1:], whole.cache.take(slice(0, len(whole.cache) - 1)))
        floor = abs(read(again.logits, *answers).margin - self.reference.reading.margin)
        readings = (theirs, self.reference.reading) if donor else (self.reference.reading, theirs)
        self.gate = gate_columns(*readings, floor)
        known = bool(beginning_of_text(subject.tokenizer))
        headers = [header for header in HEADERS if known or header != "bos"]
        self.chunks = {header: compile_segment(subject, self.prompt, _CHUNK, header) for header in headers}

    def compose(self, header: Header, seam: int) -> Composed:
        composition = composition_of(self.prompt, {_CHUNK: self.chunks[header]})
        return make_scheme("splice", seam=seam).compose(self.subject, composition)

    def cells(self, seams: Sequence[int]) -> Iterator[Measurement]:
        """Every header with every seam."""
        ids, at = self.prompt.token_ids, self.prompt.spans[_CHUNK]
        before = self.cache.take(slice(0, at.start)) if at.start else None
        for header, chunk in self.chunks.items():
            for seam in seams:
                scheme = make_scheme("splice", seam=seam)
                logits, run = decide_behind(self.subject, before, scheme, chunk, ids[at.end :])
                cost = {"tokens": at.start + run, "full_tokens": len(ids) - 1}
                where = {"measurement": "cell", "header": header, "seam": seam}
                yield {**where, **cost, **self.reference.compare(logits)}

    def sinks(self) -> Iterator[Measurement]:
        """The first token behind each header, repaired, and in the full prefill."""
        caches = {str(header): self.compose(header, 0).cache for header in self.chunks}
        caches |= {REPAIRED: self.compose("none", 1).cache, FULL_PREFILL: self.cache}
        for name, cache in caches.items():
            reading = read_sink(self.subject, self.prompt.token_ids, cache, self.prompt.spans[_CHUNK])
            for layer in range(self.subject.layers):
                columns = {column: getattr(reading, column)[layer] for column in SINK}
                yield {"measurement": "sink", "cache": name, "layer": layer, **columns}
