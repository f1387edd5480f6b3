"""Part of the cache is evicted: do the notes survive, and do edits still work on what is left?

Each method keeps a share of every layer's entries at the end of the prompt's prefill. Then the decision is read

    as it is            from what is left, on both prompts of the pair
    field_only          with the field's entries from the donor's cache
    downstream_only     with those after the field from the donor's cache, as far as they are kept
    erratum             with an erratum and the task run again on what is left
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator
from torch import Tensor

from kvprobe.edit.base import FieldEdit
from kvprobe.engine.forward import forward
from kvprobe.engine.interventions import Intervention, KVPatch
from kvprobe.engine.readout import read, read_rows
from kvprobe.engine.sweep import run_patches
from kvprobe.eviction.base import EvictionMethod, Observed, evicted, kept_entries, make_eviction
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.aligned_positions import delimiters
from kvprobe.probes.kit.edit_cases import field_edit
from kvprobe.probes.kit.prefilled_pair import PrefilledPair, prefill_pair
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.engine.cache import KVCache
    from kvprobe.models.subject import Subject

METHODS: dict[str, dict[str, Any]] = {
    "streaming_llm": {},
    "h2o": {},
    "scissorhands": {},
    "snapkv": {},
    "delimiters": {},
    "no_delimiters": {"name": "delimiters", "dropped": True},
    "random": {},
}


@PROBES.register("eviction")
class Eviction(Probe):
    """Decisions, notes and edits on caches of which a budget is left."""

    methods: Mapping[str, Mapping[str, Any]] = Field(
        METHODS, min_length=1, description="parameters by method; `name` where one is used twice under other names"
    )
    budgets: tuple[Annotated[int, Field(ge=1, le=100)], ...] = Field(
        (10, 25, 50, 75), min_length=1, description="entries that stay, in percent"
    )

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        for label, given in methods.items():
            _method(label, given)
        return methods

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each method and budget.

        Raises:
            ConfigError: a pair does not say its entity, field and values.
        """
        methods = {label: _method(label, given) for label, given in self.methods.items()}
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            case = _Case(subject, pair)
            for label, method in methods.items():
                for budget in self.budgets:
                    row = {"method": label, "budget": budget, **case.under(method, budget / 100)}
                    rows.append({"pair": index, **case.prefilled.common(), **row})
            progress(index + 1, len(pairs))
        return rows


def _method(label: str, given: Mapping[str, Any]) -> EvictionMethod:
    parameters = dict(given)
    if not isinstance(name := parameters.pop("name", label), str):
        raise ValueError(f"name must be that of an eviction method, not {name!r}")
    return make_eviction(name, **parameters)


class _Case:
    """A pair, what a serving system observes of its prompts, and the edit that the new value is."""

    def __init__(self, subject: Subject, pair: Pair) -> None:
        self.subject, self.pair = subject, pair
        self.prefilled: PrefilledPair = prefill_pair(subject, pair)
        self.edit: FieldEdit = field_edit(pair, subject.tokenizer)
        self.observed = [Observed(subject, prompt.token_ids[:-1]) for prompt in (pair.base, pair.donor)]
        self.marks = delimiters(pair, subject.tokenizer)

    def under(self, method: EvictionMethod, budget: float) -> Measurement:
        """The decisions that a method and its budget leave."""
        pair, prefilled = self.pair, self.prefilled
        answers = pair.base_answer_id, pair.donor_answer_id
        kept, of_donor = (kept_entries(method, observed, budget) for observed in self.observed)
        knockouts = evicted(kept, [pair.decision_position])
        patches = {"field_only": pair.field, "downstream_only": pair.downstream}
        rows: list[list[Intervention]] = [[*knockouts]]
        rows += [[KVPatch(tuple(span.positions), prefilled.oracle), *knockouts] for span in patches.values()]
        base, *patched = read_rows(run_patches(self.subject, pair.base.token_ids, prefilled.stale, rows), *answers)
        hidden = [evicted(of_donor, [pair.decision_position])]
        donor = read(run_patches(self.subject, pair.donor.token_ids, prefilled.oracle, hidden)[0], *answers)
        erratum = read(self._amended(kept, prefilled.stale), *answers)
        return {
            "margin": base.margin,
            "right_base": base.margin < 0,
            "right_donor": donor.margin > 0,
            **{f"margin_{name}": reading.margin for name, reading in zip(patches, patched, strict=True)},
            "new_after_erratum": erratum.margin > 0,
            **dict(self._shares(kept)),
        }

    def _amended(self, kept: Tensor, stale: KVCache) -> Tensor:
        """Logits `[vocab]` behind the erratum and the task, run on the kept entries before the task."""
        start, ids = self.pair.base.spans["task"].start, self.pair.base.token_ids
        said = [*self.edit.erratum_ids, *ids[start:]]
        places = range(start, start + len(said))
        knockouts = evicted(kept[:, :start], places)
        return forward(self.subject, said, stale.take(slice(0, start)), positions=places, knockouts=knockouts).logits

    def _shares(self, kept: Tensor) -> Iterator[tuple[str, float]]:
        """How much of the field, the rule and the delimiters is kept, over all layers."""
        spans = {"field": self.pair.field.positions, "policy": self.pair.base.spans["policy"].positions}
        for name, positions in {**spans, "delimiters": sorted(self.marks)}.items():
            inside = [position for position in positions if position < kept.shape[1]]
            yield f"kept_{name}", float(kept[:, inside].double().mean())
