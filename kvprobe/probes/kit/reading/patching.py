"""Effects of patched decisions and of the change of a cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from kvprobe.stats import Effect, Sample

DECISION = ("recovery", "margin_shift", "flip_rate")
"""What `decision_effects` makes of a condition."""


def conditions(sample: Sample, *numbered: str) -> Iterator[tuple[str, Sample]]:
    """The condition and the rows of each `intervention`, in order of first appearance.

    Args:
        sample: rows with an `intervention`.
        numbered: conditions whose number is a parameter: `suffix_{percent}` stands for the interventions `suffix_2`,
            `suffix_5` and so on. Any other intervention is a condition of its own.

    Yields:
        The condition for names of effects, and its rows, with the number as the value of the parameter.
    """
    patterns = {
        condition: re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(condition))) for condition in numbered
    }
    for intervention, part in sample.by("intervention"):
        matches = ((condition, pattern.fullmatch(intervention)) for condition, pattern in patterns.items())
        condition, match = next(((condition, match) for condition, match in matches if match), (intervention, None))
        numbers = match.groupdict() if match else {}
        yield condition, part.named(**{name: int(number) for name, number in numbers.items()})


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


def over_draws(sample: Sample) -> Sample:
    """One row for each pair (and direction, where there are two): margins and flips as means over its draws."""
    keys = [key for key in ("pair", "direction") if key in sample.rows]
    numbers = sample.table(sample.rows.assign(flipped=sample.rows["flipped"].astype(float)))
    return numbers.per(*keys, margin="mean", m_base="mean", m_donor="mean", flipped="mean")


def identity_errors(sample: Sample, identities: Mapping[str, str]) -> Iterator[Effect]:
    """`X.error`: how far, in logits, an intervention X may lie from the unedited margin that it must equal.

    Args:
        sample: rows with `intervention` and `margin`.
        identities: by intervention, the column of that margin.
    """
    for intervention, ought in identities.items():
        if len(part := sample.of(intervention=intervention)):
            yield part.maximum(f"{intervention}.error", (part.rows["margin"] - part.rows[ought]).abs())


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
