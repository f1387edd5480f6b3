"""Knockouts around a chain of thought (protocol 1.4 and 1.8, critique ME3): does the chain read the field again?

A chain is generated from each of three caches of a prompt that asks for one: `stale` (the old value and its notes),
`field_only` (the new value with the old notes) and `new`. The answer's cue ends it, appended where the model did not
write it, and the decision is read there.

While the chain is generated and decided, none of its tokens can attend to

    block_field      the field
    block_rule       as many tokens of the rule, drawn at random

After a chain that was generated freely, only the decision token cannot attend to

    mask_field       the field
    mask_downstream  the prompt after the field
    mask_chain       the chain
    mask_both        the prompt after the field, and the chain
    mask_random      as many positions of the prompt after the field as the chain has, drawn at random

The remaining cells are `free`, without a knockout, and `same_value`, the stale cache computed in another order, whose
chain should be the same token for token. Every arm runs on all three caches, which separates what masking does to any
decision from what it does to a decision that follows the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import Field

from kvprobe.engine.forward import prefill
from kvprobe.engine.generation import generate
from kvprobe.engine.interventions import AttentionKnockout, KVPatch
from kvprobe.engine.readout import Readout, read_rows
from kvprobe.engine.sweep import run_patches
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.prefilled_pair import prefilled_in_two_pieces
from kvprobe.probes.mechanism.chain_knockout.chains import Cell, Chain, finished
from kvprobe.tasks.context import encode_segment
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

CACHES = ("stale", "field_only", "new")
_Arms = dict[str, tuple[AttentionKnockout, ...]]


@PROBES.register("chain_knockout")
class ChainKnockout(Probe):
    """Whether a chain of thought reads the field again, and whether the decision then needs the old notes."""

    limit: int = Field(64, ge=1, description="most tokens of a chain; a longer one counts as censored")
    cue: str = Field("Answer:", description="what ends a chain, and is put after one that did not write it")
    temperature: float = Field(0.0, ge=0.0, description="0 for the most likely token")
    seed: int = Field(0, ge=0, description="of sampling and of the random key sets")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each cache and arm."""
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            chains = self._chains(subject, pair, index)
            found = [row for chain in chains for row in self._decide(subject, pair, chain, index)]
            free = {row["cache"]: row for row in found if row["arm"] == "free"}
            (same,) = (row for row in found if row["arm"] == "same_value")
            common = {
                "m_base": free["stale"]["margin"],
                "m_donor": free["new"]["margin"],
                "mass_base": free["stale"]["mass"],
                "mass_donor": free["new"]["mass"],
                "noise_floor": abs(free["stale"]["margin"] - same["margin"]),
            }
            for row in found:
                own = free[row["cache"]]
                same_chain = row["chain"] == own["chain"]
                rows.append({"pair": index, **common, **row, "free_margin": own["margin"], "same_chain": same_chain})
            progress(index + 1, len(pairs))
        return rows

    def _chains(self, subject: Subject, pair: Pair, index: int) -> list[Chain]:
        """All chains of a pair, generated side by side from the base prompt's cache."""
        stale, new = (prefill(subject, context.token_ids).cache for context in (pair.base, pair.donor))
        whole = tuple(range(pair.field.start, pair.decision_position))
        patches = {
            "stale": (),
            "field_only": (KVPatch(tuple(pair.field.positions), new),),
            "new": (KVPatch(whole, new),),
        }
        cells = [
            Cell(name, arm, patches[name], knockouts)
            for name in CACHES
            for arm, knockouts in self._blocks(pair, index).items()
        ]
        again = KVPatch(whole, prefilled_in_two_pieces(subject, pair), no_op=True)
        cells.append(Cell("stale", "same_value", (again,)))
        cue = encode_segment(self.cue, subject.tokenizer)
        generated = generate(
            subject,
            pair.base.token_ids,
            stale,
            [(*cell.patches, *cell.knockouts) for cell in cells],
            limit=self.limit,
            stop=[self.cue],
            temperature=self.temperature,
            generator=torch.Generator().manual_seed(1_000_003 * self.seed + index),
        )
        return [finished(subject, pair, cell, chain, cue) for cell, chain in zip(cells, generated, strict=True)]

    def _blocks(self, pair: Pair, index: int) -> _Arms:
        """Knockouts that act on every token from the prompt's last one on."""
        # Room for the cue too, which has no more tokens than bytes.
        last = pair.decision_position + self.limit + len(self.cue.encode())
        tokens = tuple(range(pair.decision_position, last + 1))
        field = tuple(pair.field.positions)
        arms: _Arms = {"free": (), "block_field": (AttentionKnockout(tokens, field, no_op=True),)}
        policy = pair.base.spans.get("policy")
        if policy is not None and len(policy) >= len(field):
            start = int(self._generator(index).integers(policy.start, policy.end - len(field) + 1))
            part = tuple(range(start, start + len(field)))
            arms["block_rule"] = (AttentionKnockout(tokens, part, no_op=True),)
        return arms

    def _masks(self, pair: Pair, chain: Chain, index: int) -> _Arms:
        """Knockouts that act on the decision token alone."""
        decision = (len(chain.ids) - 1,)
        field, downstream = tuple(pair.field.positions), tuple(pair.downstream.positions)
        written = tuple(range(len(pair.base.token_ids), decision[0]))
        size = min(len(written), len(downstream))
        drawn = tuple(self._generator(index).choice(downstream, size, replace=False).tolist())
        keys = {
            "mask_field": field,
            "mask_downstream": downstream,
            "mask_chain": written,
            "mask_both": downstream + written,
            "mask_random": drawn,
        }
        # A set may lie outside the sliding window; then hiding it changes nothing, as it should.
        return {arm: (AttentionKnockout(decision, positions, no_op=True),) for arm, positions in keys.items()}

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, index]))

    def _decide(self, subject: Subject, pair: Pair, chain: Chain, index: int) -> list[Measurement]:
        """Rows of one chain: its own decision, and with a free chain also the masked ones."""
        arms: _Arms = {chain.cell.arm: chain.cell.knockouts}
        if chain.cell.arm == "free":
            arms |= self._masks(pair, chain, index)
        logits = run_patches(subject, chain.ids, chain.cache, list(arms.values()))
        readings = read_rows(logits, pair.base_answer_id, pair.donor_answer_id)
        return [_row(pair, chain, arm, reading) for arm, reading in zip(arms, readings, strict=True)]


def _row(pair: Pair, chain: Chain, arm: str, reading: Readout) -> Measurement:
    value = pair.donor.token_ids[pair.field.end - 1]
    return {
        "cache": chain.cell.cache,
        "arm": arm,
        "margin": reading.margin,
        "mass": reading.mass,
        "chain": " ".join(str(token) for token in chain.written),
        "chain_tokens": len(chain.written),
        "censored": chain.censored,
        "names_new_value": value in chain.written,
    }
