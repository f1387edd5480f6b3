"""Cost against correctness of all edit methods on the same pairs (protocol 5.1, critique ED1, ED2, ED4, G5).

Every arm starts from the stale cache of the base prompt and is asked for the decision under the new value:

    stale, field_only, selective_K, cacheblend_P, full_downstream, hoist_to_end, erratum, field_and_erratum,
    full_reprefill   as in `kvprobe.edit`
    oracle_copy_K    upper bound: field and K tokens copied from the full prefill, at the cost of that prefill

Costs are shares of the full reprefill of the same pair in the same run: tokens counted on the model's layers, FLOPs and
seconds from receipts. The decision token is left out of all of them, for every arm runs it once. Seconds are those of
the incremental work after a warm-up of every arm; they are reported, and on a shared machine nothing more.

    no_op   every in-place method applied to the value that stands there already; it must not move the decision
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.kit.edit_arms import Arm, as_patch, make_arm, read_patches, run_arm, same_value
from kvprobe.probes.kit.edit_cases import EditCase, measure_cases
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

REFERENCE = "full_reprefill"
# An appended or a moved line is another prompt, whatever it says.
_NOT_IN_PLACE = ("stale", "erratum", "field_and_erratum", "hoist_to_end")


@PROBES.register("frontier")
class Frontier(Probe):
    """What each edit method costs and how often it decides correctly, all on the same pairs."""

    # The majority baseline is learned from the other pairs of a scenario.
    needs_all_pairs: ClassVar[bool] = True

    sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (8, 32), min_length=1, description="tokens that the selective arms recompute"
    )
    criterion: str = Field("decision_attention", description="how they are chosen")
    share: float = Field(0.15, gt=0, le=1, description="of the tokens that the CacheBlend-style arm recomputes")

    def arms(self) -> list[Arm]:
        """All arms, the upper bound last."""
        largest, percent = max(self.sizes), {"percent": round(100 * self.share)}
        return [
            *(make_arm(name, name) for name in ("stale", "field_only")),
            *(
                make_arm("selective_{size}", "selective", {"size": k}, k=k, criterion=self.criterion)
                for k in self.sizes
            ),
            make_arm("cacheblend_{percent}", "cacheblend", percent, share=self.share),
            *(make_arm(name, name) for name in ("erratum", "field_and_erratum", "hoist_to_end")),
            *(make_arm(name, name) for name in ("full_downstream", REFERENCE)),
            make_arm("oracle_copy_{size}", "oracle_copy", {"size": largest}, k=largest, criterion=self.criterion),
        ]

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each arm and one for each in-place arm as a no-op.

        Raises:
            ConfigError: a pair does not say its entity, field and values.
        """
        arms = self.arms()

        def rows(case: EditCase, index: int) -> Iterator[Measurement]:
            if not index:
                for arm in arms:  # Warms up what is timed.
                    arm.method.apply(subject, case.stale, case.edit)
            for arm in arms:
                yield {"edit": "new", **run_arm(subject, case, arm)}
            yield from _no_op_rows(subject, case, arms)

        return measure_cases(subject, pairs, progress, rows)


def _no_op_rows(subject: Subject, case: EditCase, arms: Sequence[Arm]) -> Iterator[Measurement]:
    """The methods that write new entries in place, applied to the value that is there."""
    same = same_value(case)
    in_place = [arm for arm in arms if arm.method.name not in _NOT_IN_PLACE and not arm.method.upper_bound]
    patches = [as_patch(same, arm.method.apply(subject, same.stale, same.edit)) for arm in in_place]
    for arm, reading in zip(in_place, read_patches(subject, same, patches), strict=True):
        yield {"edit": "same", "arm": arm.name, "margin": reading.margin}
