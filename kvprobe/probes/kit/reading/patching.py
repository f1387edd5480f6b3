"""Effects of patched decisions and of the change of a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvprobe.stats import Effect, Sample


def decision_effects(sample: Sample, condition: str) -> Iterator[Effect]:
    """Effects of one intervention on the decision.

    `X.recovery` (ratio of sums; `median` and `mean_of_ratios` in its `extra`), `X.margin_shift` (logits), and
    `X.flip_rate` (share of decisions that change).

    Args:
        sample: rows with `margin`, `m_base`, `m_donor` (logits), `flipped`.
        condition: X.
    """
    yield sample.recovery(f"{condition}.recovery")
    yield sample.mean(f"{condition}.margin_shift", sample.shift, "logits", noise_floor=sample.floor)
    yield sample.rate(f"{condition}.flip_rate", "flipped")


def shapley_split(sample: Sample, interventions: Sequence[str], parts: tuple[str, str]) -> Iterator[Effect]:
    """How two parts of an intervention share its effect (critique ME1).

    `interaction.recovery` is what the parts do together beyond what each does alone; `shapley_X.recovery` is the
    mean of what part X adds to nothing and to the other part. The two Shapley values add up to the whole.

    Args:
        sample: a row for each `pair` and each `intervention`, with `margin`, `m_base`, `m_donor` (logits).
        interventions: names of the first part's, the second part's and the whole's.
        parts: what the two parts are called.
    """
    split = sample.of(intervention=tuple(interventions))
    margin = split.rows.pivot(index="pair", columns="intervention", values="margin")
    if not set(interventions) <= set(margin.columns):
        return
    pairs = split.per("pair", m_base="first", m_donor="first")
    first, second, both = (margin[name].loc[pairs.rows.index] - pairs.rows["m_base"] for name in interventions)
    yield pairs.recovery("interaction.recovery", both - first - second)
    yield pairs.recovery(f"shapley_{parts[0]}.recovery", (first + (both - second)) / 2)
    yield pairs.recovery(f"shapley_{parts[1]}.recovery", (second + (both - first)) / 2)


def cache_change_effects(sample: Sample) -> Iterator[Effect]:
    """`blast_radius.X` (largest absolute change of all) and `relative_change.X` (mean) for each region X.

    `sample` has the rows of `change_by_layer`.
    """
    for region, part in sample.by("region"):
        largest = part.rows[["change_keys", "change_values"]].max(axis=1)
        yield part.maximum(f"blast_radius.{region}", largest, "activation")
        yield part.mean(f"relative_change.{region}", part.rows[["relative_keys", "relative_values"]].mean(axis=1))
