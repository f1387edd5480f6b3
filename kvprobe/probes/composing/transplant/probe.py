"""Fidelity of composed prompts (protocol 6.2, critique CO1, CO3, CO6, G8): does a composed prompt decide as a prefill?

Both prompts of every pair are decided by one full prefill and by composing the very same tokens from the rule, compiled
elsewhere, and everything else, run in order. Where the rule stands before the field it is self-contained; in slot
`start` the field comes first, and a rule compiled without it lacks the notes that it takes of the field: it is coupled.

    splice_none, splice_bos, splice_neutral   moved, compiled behind nothing, the beginning of a text, a neutral line
    splice_real    compiled behind what stands before it here: the upper bound
    seam_N         as splice_neutral, its first N tokens run in place
    epic, prompt_cache, cacheblend_P   as `kvprobe.composing`, compiled behind nothing, as published
    relative       compiled behind another prompt's beginning of another length and slid by the difference (CacheSlide)
    no_rotation    as splice_none, keys left at the positions they were computed at
    wrong_chunk, shuffled, removed   floors: another scenario's rule, the rule's tokens shuffled, no rule
    full_prefill   the ceiling: the same prompt run in pieces

KVLink is not among them: it needs link tokens trained into the model, which no model here has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from kvprobe.composing.base import make_scheme
from kvprobe.composing.chunk import Chunk, beginning_of_text
from kvprobe.engine.forward import prefill
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.fidelity import (
    FULL_PREFILL,
    REMOVED,
    WRONG,
    ChunkStore,
    Reference,
    ReuseArm,
    decide_behind,
    reference_of,
)
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

CONDITIONS = ("self_contained", "coupled")
CHUNK = "policy"


@PROBES.register("transplant")
class Transplant(Probe):
    """How far composed prompts decide as a full prefill, by reuse scheme, beside floors and a ceiling."""

    # The wrong chunk and the other beginning come from other pairs.
    needs_all_pairs: ClassVar[bool] = True

    seam: int = Field(8, ge=1, description="first tokens of the chunk that the seam arm and EPIC run")
    share: float = Field(0.15, gt=0, le=1, description="of the chunk's tokens that the CacheBlend arm recomputes")
    slot: int = Field(32, ge=1, description="prompt_cache puts the chunk at a multiple of this position")
    equivalence: float = Field(0.1, gt=0, description="share of the mean margin that counts as no difference")
    seed: int = Field(0, ge=0, description="of the shuffled tokens")

    def arms(self) -> list[ReuseArm]:
        """All arms, the floors and the ceiling last."""
        splice, sizes = make_scheme("splice"), {"seam": self.seam, "percent": round(100 * self.share)}
        return [
            *(ReuseArm(f"splice_{header}", splice, header) for header in ("none", "bos", "neutral", "real")),
            ReuseArm("seam_{seam}", make_scheme("splice", seam=self.seam), "neutral", sizes=sizes),
            ReuseArm("epic", make_scheme("epic", tokens=self.seam)),
            ReuseArm("prompt_cache", make_scheme("prompt_cache", slot=self.slot)),
            ReuseArm("cacheblend_{percent}", make_scheme("cacheblend", share=self.share), sizes=sizes),
            ReuseArm("relative", splice, elsewhere=True),
            ReuseArm("no_rotation", make_scheme("no_rotation")),
            ReuseArm(WRONG, splice, "neutral", "other"),
            ReuseArm("shuffled", splice, "neutral", "shuffled"),
            ReuseArm(REMOVED, splice, content="nothing"),
            ReuseArm(FULL_PREFILL, make_scheme(FULL_PREFILL)),
        ]

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each of its two prompts and each arm that the model and the pairs allow.

        Raises:
            ConfigError: a pair does not say its slot, or has no segment `policy`.
        """
        generator = torch.Generator().manual_seed(self.seed)
        rows: list[Measurement] = []
        for index in range(len(pairs)):
            made = self._pair_rows(_Chunks(subject, pairs, index, generator))
            gate = _gate(made)
            rows += [{"pair": index, **gate, **row} for row in made]
            progress(index + 1, len(pairs))
        return rows

    def _pair_rows(self, chunks: _Chunks) -> list[Measurement]:
        subject, pair = chunks.subject, chunks.pair
        shared = {"condition": condition_of(pair), "scenario": pair.scenario.attributes.get("scenario")}
        rows: list[Measurement] = []
        for reference in (reference_of(subject, pair, donor=donor) for donor in (False, True)):
            ids, at = reference.prompt.token_ids, reference.prompt.spans[CHUNK]
            before = prefill(subject, ids[: at.start]).cache if at.start else None
            common = {"reference_mass": reference.reading.mass, "full_tokens": len(ids) - 1}
            for arm in (arm for arm in self.arms() if chunks.has(arm)):
                logits, run = decide_behind(subject, before, arm.scheme, chunks.chunk(reference, arm), ids[at.end :])
                row = {**common, **reference.compare(logits), "tokens": at.start + run}
                rows.append({**shared, "arm": arm.name, **row})
        return rows


def condition_of(pair: Pair) -> str:
    """Whether a pair's rule is `self_contained` (it stands before the field) or `coupled`.

    Raises:
        ConfigError: the pair has no segment `policy`.
    """
    if CHUNK not in pair.base.spans:
        raise ConfigError("The probe transplant composes prompts from their rule: use task field_position.")
    return CONDITIONS[pair.base.spans[CHUNK].start > pair.field.start]


class _Chunks:
    """What the arms put in place of one pair's rule; each chunk is compiled once."""

    def __init__(self, subject: Subject, pairs: Sequence[Pair], index: int, generator: torch.Generator) -> None:
        self.subject, self.pair = subject, pairs[index]
        condition_of(self.pair)
        own = _rule(self.pair)
        others = [pairs[(index + step) % len(pairs)] for step in range(1, len(pairs))]
        order = torch.randperm(len(own), generator=generator).tolist()
        shuffled = tuple(own[place] for place in order)
        self._ids = {"own": own, "other": _wrong_rule(self.pair, others), "shuffled": shuffled}
        self._elsewhere = _other_beginning(self.pair, others)
        self._store = ChunkStore(subject)

    def has(self, arm: ReuseArm) -> bool:
        """Whether the model and the pairs have what the arm needs."""
        if arm.header == "bos":
            return bool(beginning_of_text(self.subject.tokenizer))
        return bool(self._elsewhere) if arm.elsewhere else arm.content != "other" or bool(self._ids["other"])

    def chunk(self, reference: Reference, arm: ReuseArm) -> Chunk | None:
        """The arm's chunk; None for the arm without a rule."""
        if arm.content == "nothing":
            return None
        if arm.elsewhere:
            return self._store.chunk(self._ids["own"], "real", self._elsewhere)
        before = reference.prompt.token_ids[: reference.prompt.spans[CHUNK].start]
        return self._store.chunk(self._ids[arm.content], arm.header, before)


def _wrong_rule(pair: Pair, others: Sequence[Pair]) -> tuple[int, ...]:
    """The rule of the next pair of another scenario, of the same condition if there is one."""
    found = [other for other in others if other.scenario.skeleton != pair.scenario.skeleton]
    same = [other for other in found if condition_of(other) == condition_of(pair)] or found
    return _rule(same[0]) if same else ()


def _rule(pair: Pair) -> tuple[int, ...]:
    return pair.base.token_ids[pair.base.spans[CHUNK].start : pair.base.spans[CHUNK].end]


def _other_beginning(pair: Pair, others: Sequence[Pair]) -> tuple[int, ...]:
    """What stands before the rule in the next pair of that condition where it has another length."""
    length = pair.base.spans[CHUNK].start
    for other in others:
        start = other.base.spans[CHUNK].start
        if condition_of(other) == condition_of(pair) and start not in (0, length):
            return other.base.token_ids[:start]
    return ()


def _gate(rows: Sequence[Measurement]) -> Measurement:
    """What the inclusion gate reads, from the rows of both prompts; the noise is that of the ceiling."""
    margins = {row["prompt"]: row for row in rows if row["arm"] == FULL_PREFILL}
    base_row, donor_row = margins["base"], margins["donor"]
    return {
        "m_base": -base_row["reference_margin"],
        "m_donor": donor_row["reference_margin"],
        "mass_base": base_row["reference_mass"],
        "mass_donor": donor_row["reference_mass"],
        "noise_floor": max(base_row["margin_error"], donor_row["margin_error"]),
    }
