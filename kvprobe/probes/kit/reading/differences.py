"""How much more one arm or intervention recovers than another, on the pairs that both were measured on."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.stats import Effect, Sample


def recovery_difference(
    sample: Sample, name: str, first: str, second: str, *, by: str = "arm", column: str = "margin"
) -> Iterator[Effect]:
    """How much more the first arm recovers than the second on the pairs that both were measured on.

    Args:
        sample: rows of all arms, with `pair`, `m_base`, `m_donor` (logits); several rows of an arm in one pair enter
            with their mean.
        name: of the effect, `.recovery` included.
        first: value of `by`.
        second: value of `by`.
        by: the column that tells the arms apart.
        column: what is compared, in logits.

    Yields:
        The effect, or nothing where no pair has both arms.
    """
    both = sample.of(**{by: (first, second)})
    means = both.rows.pivot_table(index="pair", columns=by, values=column).reindex(columns=[first, second])
    difference = (means[first] - means[second]).dropna()
    if len(difference):
        pairs = both.per("pair", m_base="first", m_donor="first")
        yield pairs.table(pairs.rows.loc[difference.index]).recovery(name, difference)
