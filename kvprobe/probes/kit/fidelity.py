"""The study of fidelity: prompts decided by a full prefill, and by putting compiled chunks in their place.

Every probe of composing has arms (`ReuseArm`), the reference that an arm's decision is compared with (`Reference`), and
chunks that are compiled once (`ChunkStore`). What the rows mean stands in `kvprobe.probes.kit.reading.fidelity`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from kvprobe.composing.base import ReuseScheme
from kvprobe.composing.chunk import Chunk, Header, compile_behind
from kvprobe.engine.agreement import agreement
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.probes.base import Measurement
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

FULL_PREFILL = "full_prefill"
WRONG, REMOVED = "wrong_chunk", "removed"
"""Floors: another prompt's chunk, and none."""
Content = Literal["own", "other", "shuffled", "nothing"]


@dataclass(frozen=True, eq=False)
class ReuseArm:
    """A way of composing: how a chunk is put into the prompt, what it was compiled behind, and what it holds.

    Attributes:
        kind: the arm's name, with its sizes by name: `seam_{seam}`.
        scheme: how the chunk is put there.
        header: what it was compiled behind.
        content: the prompt's own tokens, those of another prompt, its own shuffled, or nothing.
        elsewhere: whether it was compiled behind another prompt's beginning, in place of a header.
        sizes: by the names in `kind`.
    """

    kind: str
    scheme: ReuseScheme
    header: Header = "none"
    content: Content = "own"
    elsewhere: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As rows have it: `seam_8`."""
        return self.kind.format(**self.sizes)


@dataclass(frozen=True, eq=False)
class Reference:
    """A prompt with the decision of its full prefill, which every composed decision is compared with.

    Attributes:
        prompt: its tokens.
        answers: the base's answer and the donor's, as token ids.
        donor_is_right: whether the donor's answer is the right one here.
        logits: of the full prefill, `[vocab]`.
        reading: its decision.
    """

    prompt: TokenizedContext
    answers: tuple[int, int]
    donor_is_right: bool
    logits: Tensor
    reading: Readout

    def compare(self, logits: Tensor) -> Measurement:
        """The columns of one decision beside the reference's; margins are the right answer over the wrong, in logits.

        Agreement is read in several ways, since cosine alone does not tell good caches from bad ones (critique G8).
        """
        margin, sign = read(logits, *self.answers).margin, 1 if self.donor_is_right else -1
        right, reference = sign * margin, sign * self.reading.margin
        return {
            "prompt": "donor" if self.donor_is_right else "base",
            "margin": right,
            "reference_margin": reference,
            "margin_error": abs(right - reference),
            "correct": right > 0,
            "agrees": (margin > 0) == (self.reading.margin > 0),
            "answers_donor": margin > 0,
            "reference_answers_donor": self.reading.margin > 0,
            **asdict(agreement(logits, self.logits)),
        }


def reference_of(subject: Subject, pair: Pair, *, donor: bool, logits: Tensor | None = None) -> Reference:
    """One prompt of a pair with the decision of its full prefill, which is run unless its `logits` are given."""
    prompt, answers = pair.donor if donor else pair.base, (pair.base_answer_id, pair.donor_answer_id)
    given = prefill(subject, prompt.token_ids).logits if logits is None else logits
    return Reference(prompt, answers, donor, given, read(given, *answers))


class ChunkStore:
    """Compiles every chunk once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._chunks: dict[tuple[tuple[int, ...], Header, tuple[int, ...]], Chunk] = {}

    def chunk(self, ids: tuple[int, ...], header: Header, before: tuple[int, ...] = ()) -> Chunk:
        """The tokens `ids`, compiled behind a header; only the header `real` uses what stands `before` them."""
        key = ids, header, before if header == "real" else ()
        if key not in self._chunks:
            self._chunks[key] = compile_behind(self.subject, ids, header, before)
        return self._chunks[key]


def decide_behind(
    subject: Subject, before: KVCache | None, scheme: ReuseScheme, chunk: Chunk | None, rest: Sequence[int]
) -> tuple[Tensor, int]:
    """Put a chunk, or none, behind what stands before it and run the rest.

    It is what `ReuseScheme.compose` does, for many schemes that share a beginning, which is run once.

    Returns:
        The logits `[vocab]` of the decision, and how many tokens were run after the beginning to fill the cache (the
        last token, which every prompt runs to decide, is not counted).
    """
    cache, run = before, 0
    if chunk is not None:
        placed = scheme.place(subject, before, chunk)
        cache, run = placed.cache, placed.receipt.tokens_appended + placed.receipt.tokens_recomputed
    return forward(subject, rest, cache).logits, run + len(rest) - 1
