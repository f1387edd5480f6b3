"""How many tokens must be recomputed until an edit is as good as an erratum (protocol 5.2, critique ED2, ED5)?

On each pair the field and the first K tokens after it, as a criterion ranks them on the stale cache, are really
recomputed, for every K and every criterion, beside the arms `erratum` and `field_and_erratum`. All share pairs, caches
and seeds. The upper bound `oracle_copy` copies the tokens that `decision_attention` chooses from the full prefill, as
the paper's selective arms do. K is capped at the number of tokens after the field.

Effects: `X_K.correct_rate` and `X_K.recovery` for criterion X; `X_K.over_erratum.difference`, the isotonic fit of the
share of right decisions over K less the erratum's share, bootstrapped by skeleton and no surer than as many skeletons
that all agree can be; and `X.k_star_erratum`, the smallest
K whose fit is no more than `margin` below the erratum's share. Its interval inverts those of the differences: it goes
from the first K that may be within the margin to the first K that is non-inferior, which is the one to use. Where no K
is, all tokens after the field stand in for it, for recomputing all of them is the oracle. The same against
`field_and_erratum`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from kvprobe.edit.selection import SELECTIONS, candidates
from kvprobe.engine.interventions import KVPatch
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.edit_arms import (
    copied,
    make_arm,
    oracle_cache,
    read_patches,
    recomputed,
    run_arm,
    selection_order,
)
from kvprobe.probes.kit.edit_cases import EditCase, measure_cases, reading_row
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

REFERENCES = ("erratum", "field_and_erratum")
COPY = "oracle_copy"
COPIED_CRITERION = "decision_attention"


@PROBES.register("k_sweep")
class KSweep(Probe):
    """Share of correct decisions and recovery over the number of recomputed tokens, against an erratum."""

    # The majority baseline is learned from the other pairs of a scenario.
    needs_all_pairs: ClassVar[bool] = True

    sizes: tuple[int, ...] = Field((0, 1, 2, 4, 8, 16, 32, 64), min_length=2, description="recomputed tokens")
    criteria: tuple[str, ...] = Field(
        ("decision_attention", "first_layer_deviation", "suffix", "random"), description="how tokens are ranked"
    )
    margin: float = Field(0.15, gt=0, lt=1, description="largest loss of correct decisions that counts as none")
    batch_size: int | None = Field(default=None, ge=1, description="decisions in one forward pass")

    @field_validator("criteria")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            SELECTIONS.get(name)
        return names

    @field_validator("sizes")
    @classmethod
    def _increasing(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if list(sizes) != sorted(set(sizes)) or sizes[0] < 0:
            raise ValueError("give increasing sizes from 0 on")
        return sizes

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each criterion and size, and one for each erratum arm.

        Raises:
            ConfigError: a pair does not say its entity, field and values.
        """
        arms = [make_arm(name, name) for name in REFERENCES]

        def rows(case: EditCase, _: int) -> Iterator[Measurement]:
            for arm in arms:
                yield {**run_arm(subject, case, arm), "criterion": arm.name}
            yield from self._sweep(subject, case)

        return measure_cases(subject, pairs, progress, rows)

    def _sweep(self, subject: Subject, case: EditCase) -> Iterator[Measurement]:
        after = len(candidates(case.stale, case.edit))
        orders = {name: selection_order(subject, case, name) for name in self.criteria}
        field_alone = recomputed(subject, case, (), 0)
        described: list[tuple[str, int]] = []
        patches: list[KVPatch] = []
        for name, order in orders.items():
            for size in self.sizes:
                described.append((name, size))
                patches.append(recomputed(subject, case, order, size) if size else field_alone)
        if COPIED_CRITERION in orders:
            oracle = oracle_cache(subject, case)
            described += [(COPY, size) for size in self.sizes]
            patches += [copied(case, oracle, orders[COPIED_CRITERION], size) for size in self.sizes]
        readings = read_patches(subject, case, patches, self.batch_size)
        for (name, size), reading in zip(described, readings, strict=True):
            yield {
                "arm": f"{name}_{size}",
                "criterion": name,
                "size": size,
                "recomputed": min(size, after),
                "after_field": after,
                **reading_row(reading),
            }
