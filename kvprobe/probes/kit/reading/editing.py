"""Effects of edits: what an arm decides, how much more it recovers than another, and constant answers as baselines."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.probes.kit.edit_cases import BASELINES
from kvprobe.stats import Effect, Sample


def arm_effects(sample: Sample, condition: str) -> Iterator[Effect]:
    """`X.correct_rate`, the share of right decisions under the new value, and `X.recovery`.

    Args:
        sample: rows of one arm, with `margin`, `m_base`, `m_donor` (logits) and `correct`.
        condition: X.
    """
    yield sample.rate(f"{condition}.correct_rate", "correct")
    yield sample.recovery(f"{condition}.recovery")


def recovery_difference(sample: Sample, name: str, first: str, second: str, *, by: str = "arm") -> Iterator[Effect]:
    """How much more the first arm recovers than the second on the pairs that both were measured on.

    Args:
        sample: rows of all arms, with `pair`, `margin`, `m_base`, `m_donor` (logits); several rows of an arm in one
            pair enter with their mean.
        name: of the effect, `.recovery` included.
        first: value of `by`.
        second: value of `by`.
        by: the column that tells the arms apart.

    Yields:
        The effect, or nothing where no pair has both arms.
    """
    both = sample.of(**{by: (first, second)})
    margins = both.rows.pivot_table(index="pair", columns=by, values="margin")
    if first not in margins or second not in margins:
        return
    difference = (margins[first] - margins[second]).dropna()
    pairs = both.per("pair", m_base="first", m_donor="first")
    if len(difference):
        yield pairs.table(pairs.rows.loc[difference.index]).recovery(name, difference)


def baseline_effects(sample: Sample) -> Iterator[Effect]:
    """`baseline.X.correct_rate` for each of `BASELINES`, over pairs: answers that read nothing of the prompt.

    `sample` has the columns of `baseline_columns`.
    """
    for name in BASELINES:
        column = f"baseline_{name}"
        if len(known := sample.measured(column)):
            yield known.per("pair", **{column: "first"}).mean(f"baseline.{name}.correct_rate", column)
