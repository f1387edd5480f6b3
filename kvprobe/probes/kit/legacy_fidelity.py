"""What all fidelity probes share: a prompt decided by full prefill, and how far another decision is from it.

The endpoints are those that tell good caches from bad ones (critique G8). Cosine is among them only to be set beside
that of a cache which is known to be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from torch import Tensor

from kvprobe.composing.base import ReuseScheme
from kvprobe.composing.chunk import Chunk
from kvprobe.engine.agreement import agreement
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.probes.base import Measurement
from kvprobe.stats import Effect, StatisticsConfig, equivalent, mean, proportion, ratio_of_sums
from kvprobe.stats.kappa import cohen_kappa
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

DIVERGENCES = ("kl", "js", "total_variation", "top_overlap")
_LEAST_SHARE = 0.2
"""Share of each answer that a reference must give for kappa to say something (critique G8)."""
_SAME = 1e-12
"""Spread, relative to the largest, below which numbers differ by rounding alone."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A prompt with the decision of its full prefill, the reference of every composed one.

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

    def towards_right(self, margin: float) -> float:
        """A margin (donor's answer over base's), as logits of the right answer over the wrong one."""
        return margin if self.donor_is_right else -margin

    def compare(self, logits: Tensor) -> Measurement:
        """The columns of one decision beside the reference's; margins are those of the right answer, in logits."""
        margin = read(logits, *self.answers).margin
        right, ought = self.towards_right(margin), self.towards_right(self.reading.margin)
        return {
            "prompt": "donor" if self.donor_is_right else "base",
            "margin": right,
            "reference_margin": ought,
            "margin_error": abs(right - ought),
            "correct": right > 0,
            "agrees": (margin > 0) == (self.reading.margin > 0),
            "answers_donor": margin > 0,
            "reference_answers_donor": self.reading.margin > 0,
            **asdict(agreement(logits, self.logits)),
        }


def judge(subject: Subject, pair: Pair) -> tuple[Judged, Judged]:
    """Both prompts of a pair, prefilled and decided: the base, then the donor."""
    base, donor = (judged(subject, pair, donor=donor) for donor in (False, True))
    return base, donor


def judged(subject: Subject, pair: Pair, *, donor: bool, logits: Tensor | None = None) -> Judged:
    """One prompt of a pair with the decision of its full prefill, which is run unless its `logits` are given."""
    prompt, answers = pair.donor if donor else pair.base, (pair.base_answer_id, pair.donor_answer_id)
    given = prefill(subject, prompt.token_ids).logits if logits is None else logits
    return Judged(prompt, answers, donor, given, read(given, *answers))


def decide_behind(
    subject: Subject, before: KVCache | None, scheme: ReuseScheme, chunk: Chunk | None, rest: Sequence[int]
) -> tuple[Tensor, int]:
    """Put a chunk, or none, behind what stands before it and run the rest.

    The same as composing the prompt (`ReuseScheme.compose`), where many schemes share the beginning and it is run once.

    Returns:
        The logits `[vocab]` of the decision, and how many tokens were run behind the beginning to fill the cache: the
        last one, which every prompt runs to decide, is not counted.
    """
    cache, run = before, 0
    if chunk is not None:
        placed = scheme.place(subject, before, chunk)
        cache, run = placed.cache, placed.receipt.tokens_appended + placed.receipt.tokens_recomputed
    return forward(subject, rest, cache).logits, run + len(rest) - 1


def fidelity_effects(
    name: str, rows: pd.DataFrame, statistics: StatisticsConfig, *, equivalence: float = 0.1
) -> Iterator[Effect]:
    """Effects of one way of composing.

    `X.agreement`, `X.kappa`, `X.same_argmax` with the full prefill; `X.accuracy` (right decisions); `X.kl`, `X.js` (in
    nats), `X.total_variation`, `X.top_overlap`; `X.margin_error` (mean absolute, in logits); `X.margin_retained` (the
    right answer's margins, summed, over the reference's; `extra` has the p value of the test that they differ by less
    than `equivalence` of the mean); `X.cosine`.

    Args:
        name: X.
        rows: of `Judged.compare`, with `noise_floor` (logits) and the cluster column.
        statistics: of the experiment.
        equivalence: largest share of the mean reference margin that counts as no difference.
    """
    shared: dict[str, Any] = {"clusters": rows[statistics.cluster], "statistics": statistics}
    floor = float(rows["noise_floor"].max())
    for effect, column in (("agreement", "agrees"), ("accuracy", "correct"), ("same_argmax", "same_argmax")):
        yield proportion(f"{name}.{effect}", rows[column].astype(float), **shared)
    share = float(rows["reference_answers_donor"].astype(float).mean())
    if _LEAST_SHARE <= share <= 1 - _LEAST_SHARE:
        answers = rows["answers_donor"].astype(int), rows["reference_answers_donor"].astype(int)
        yield cohen_kappa(f"{name}.kappa", *answers, **shared)
    for column in DIVERGENCES:
        unit = "nats" if column in ("kl", "js") else "fraction"
        yield mean(f"{name}.{column}", rows[column], unit=unit, **shared)
    yield mean(f"{name}.margin_error", rows["margin_error"], unit="logits", noise_floor=floor, **shared)
    yield _retained(name, rows, statistics, equivalence, floor)
    yield mean(f"{name}.cosine", rows["cosine"], unit="cosine", **shared)


def paired_difference(
    name: str,
    rows: pd.DataFrame,
    column: str,
    arms: tuple[Any, Any],
    statistics: StatisticsConfig,
    *,
    by: str = "arm",
    within: str = "pair",
    unit: str = "fraction",
) -> Iterator[Effect]:
    """Mean over prompts of a column under the first arm less that under the second; nothing where one was not measured.

    Args:
        name: of the effect.
        rows: with `pair` or what `within` names, `prompt`, the arms' column and the cluster column.
        column: what is compared.
        arms: the two.
        statistics: of the experiment.
        by: the column that names the arms.
        within: what the two have in common beside the prompt.
        unit: of `column`.
    """
    table = rows.assign(**{column: rows[column].astype(float)}).pivot_table(
        index=[within, "prompt", statistics.cluster], columns=by, values=column
    )
    if not set(arms) <= set(table.columns):
        return
    difference = (table[arms[0]] - table[arms[1]]).dropna()
    if not len(difference):
        return
    clusters = difference.index.get_level_values(statistics.cluster).to_list()
    yield mean(name, difference, clusters=clusters, statistics=statistics, unit=unit)


def _retained(name: str, rows: pd.DataFrame, statistics: StatisticsConfig, equivalence: float, floor: float) -> Effect:
    clusters = rows[statistics.cluster]
    effect = ratio_of_sums(
        f"{name}.margin_retained",
        rows["margin"],
        rows["reference_margin"],
        clusters=clusters,
        statistics=statistics,
        noise_floor=floor,
    )
    if clusters.nunique() < 2:
        return effect
    bound = equivalence * float(rows["reference_margin"].abs().mean())
    difference = rows["margin"] - rows["reference_margin"]
    means = difference.groupby(list(clusters)).mean()
    # Cluster means that are all the same have no spread to test with; they lie within the bound or do not.
    if float(np.ptp(means)) <= _SAME * float(means.abs().max()):
        p_value = float(abs(float(means.iloc[0])) >= bound)
    else:
        p_value = equivalent(difference, bound, clusters=list(clusters)).p_value
    return replace(effect, extra={**effect.extra, "equivalence_bound": bound, "equivalence_p_value": p_value})
