"""Which features of an SAE predict a conclusion: chosen by AUC, judged against permuted labels, matched with others.

A unit is a feature at one place of the prompt: the same feature may mean one thing at the first note and its opposite
at the second. Arrays hold prompts as `[pair, prompt]`, the base being prompt 0 and the donor prompt 1, whose
conclusions are opposite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from kvprobe.errors import SampleError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
# A control is drawn from as many of the units nearest in mean activation.
_NEAREST = 5


@dataclass(frozen=True, eq=False)
class FeatureChoice:
    """What some pairs show about the units.

    Attributes:
        ranked: active units, the one that predicts the conclusion best first.
        auc: `[unit]` of the activation for the conclusion; one half for units that are not active.
        means: `[conclusion, unit]` mean activation under either conclusion: the targets of the clamps.
        null: `[permutation]` largest distance of an active unit's AUC from one half when pairs' labels are permuted.
    """

    ranked: tuple[int, ...]
    auc: Floats
    means: Floats
    null: Floats

    @property
    def p_value(self) -> float:
        """Share of permutations whose best unit does as well as the best here, this choice counted among them."""
        best = abs(self.auc[self.ranked[0]] - 0.5)
        return float((1 + np.sum(self.null >= best - 1e-12)) / (1 + len(self.null)))

    def null_auc(self, quantile: float = 0.95) -> float:
        """AUC, above one half, that the best unit reaches by chance: a quantile over the permutations."""
        return 0.5 + float(np.quantile(self.null, quantile))


def choose_features(
    activations: Floats, conclusions: Bools, active_share: float, permutations: int, seed: int
) -> FeatureChoice:
    """Rank the units by the distance of their AUC from one half (protocol 4.3), with a permutation null (CI6).

    Under the null a pair's two prompts could change places, so a permutation swaps the labels inside pairs; the null is
    of the best unit of all, which accounts for the choice.

    Args:
        activations: `[pair, prompt, unit]`.
        conclusions: `[pair, prompt]`.
        active_share: smallest share of prompts in which a unit must be active.
        permutations: drawn for the null.
        seed: of the permutations.

    Raises:
        SampleError: no unit is active often enough.
    """
    flat = activations.reshape(-1, activations.shape[-1])
    active = np.flatnonzero((flat > 0).mean(axis=0) >= active_share)
    if not len(active):
        raise SampleError(f"No feature is active in {active_share:.0%} of the prompts; train the SAE on more vectors.")
    labels = conclusions.reshape(-1)
    auc = np.full(flat.shape[1], 0.5)
    auc[active] = areas(flat[:, active], labels[None])[0]
    generator = np.random.Generator(np.random.PCG64(seed))
    swapped = generator.random((permutations, len(conclusions))) < 0.5
    permuted = (conclusions[None] ^ swapped[:, :, None]).reshape(permutations, -1)
    null = np.abs(areas(flat[:, active], permuted) - 0.5).max(axis=1)
    ranked = active[np.argsort(-np.abs(auc[active] - 0.5), kind="stable")]
    means = np.stack([flat[~labels].mean(axis=0), flat[labels].mean(axis=0)])
    return FeatureChoice(tuple(int(unit) for unit in ranked), auc, means, null)


def areas(activations: Floats, labels: Bools) -> Floats:
    """Areas under the ROC curve `[labelling, unit]` of activations `[prompt, unit]` for labels `[labelling, prompt]`.

    Mann-Whitney's statistic with mid-ranks, so that ties count one half.
    """
    ranks = rankdata(activations, axis=0)
    positive = labels.sum(axis=1, keepdims=True).astype(float)
    negative = labels.shape[1] - positive
    return np.asarray((labels.astype(float) @ ranks - positive * (positive + 1) / 2) / (positive * negative))


def placements(activations: Floats, labels: Bools) -> Floats:
    """`[prompt]` share of the prompts with the other label that each prompt stands on the right side of.

    Their mean over the prompts of either label is the AUC, and their spread over clusters its standard error (DeLong et
    al. 1988, Obuchowski 1997).

    Args:
        activations: `[prompt]`, higher for the label true.
        labels: `[prompt]`, both present.
    """
    difference = activations[:, None] - activations[None, :]
    right = np.where(labels[:, None], difference > 0, difference < 0) + 0.5 * (difference == 0)
    other = labels[:, None] != labels[None, :]
    return np.asarray((right * other).sum(axis=1) / other.sum(axis=1))


def matched_units(
    choice: FeatureChoice, count: int, places: int, generator: np.random.Generator
) -> list[tuple[int, int]]:
    """Pairs of a chosen unit and its control: active, not chosen, at the same place, of like mean activation (CI6).

    Each control is drawn from the few nearest in mean activation and used once. Where a place has no active unit left,
    chosen units go without, so the list may be shorter than `count`.

    Args:
        choice: of the features.
        count: how many of the best units are chosen.
        places: of the prompt; unit number = place x features + feature.
        generator: of the draw.
    """
    chosen = choice.ranked[:count]
    mean = choice.means.mean(axis=0)
    features = len(mean) // places
    free = set(choice.ranked[count:])
    result = []
    for unit in chosen:
        here = [other for other in free if other // features == unit // features]
        if not here:
            continue
        near = sorted(here, key=lambda other: (abs(mean[other] - mean[unit]), other))[:_NEAREST]
        control = near[int(generator.integers(len(near)))]
        free.discard(control)
        result.append((unit, control))
    return result


def stepped(values: Floats, steps: Sequence[tuple[int, float]]) -> Floats:
    """A copy of the activations `[unit]` with a step added to some."""
    moved = values.copy()
    for unit, step in steps:
        moved[unit] += step
    return moved
