"""Linear probes over residual streams: what they read, what they are trained and tested on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from sklearn.linear_model import Ridge

from kvprobe.engine.components import components
from kvprobe.errors import SampleError
from kvprobe.probes.kit.cross_fitting import folds
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.engine.cache import KVCache
    from kvprobe.models.subject import Subject

Split = Literal["pair", "skeleton", "vocabulary", "wording", "field"]
Array = NDArray[np.float32]
Fold = tuple[NDArray[np.intp], NDArray[np.intp]]
"""Indices of the prompts that probes are trained on, and of those that they are tested on."""

# Each is crossed with each wording, and trains on what is left of both.
_WORDING_FOLDS = 3


def residual_hooks(layers: int) -> tuple[str, ...]:
    """Names of the residual stream before the first block and after each: index l is after l blocks."""
    return ("blocks.0.hook_resid_pre", *(f"blocks.{layer}.hook_resid_post" for layer in range(layers)))


def residuals(
    subject: Subject, token_ids: Sequence[int], positions: Sequence[int], cache: KVCache | None = None
) -> Array:
    """The residual stream `[position, layer, hidden]`, layer 0 being the embeddings, no norm applied.

    Args:
        subject: the model.
        token_ids: tokens to run.
        positions: indices into `token_ids`.
        cache: entries before them.
    """
    hooks = residual_hooks(subject.layers)
    activations = components(subject).capture(token_ids, hooks, cache=cache).activations
    return np.stack([activations[hook][list(positions)].float().cpu().numpy() for hook in hooks], axis=1)


def channel_spread(states: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard deviation of each channel of `[row, hidden]`; infinite where it is of the size of rounding.

    Dividing by it sets a channel that varies by rounding alone to 0 instead of inflating it.
    """
    spread = states.std(axis=0)
    return np.where(spread > 1e-6 * np.abs(states).max(), spread, np.inf)


def predictions(features: Array, targets: NDArray[np.bool_], train: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Predictions for all rows by linear probes trained on some of them.

    Ridge classification of activations standardised by the training rows: a linear probe like logistic regression,
    solved in closed form and for many targets at once. The penalty is the number of channels, so that its weight does
    not depend on the width of the model.

    Args:
        features: `[row, hidden]`.
        targets: `[row, target]`, one probe each.
        train: indices of the rows to train on.
    """
    exact = features.astype(np.float64)
    standard = (exact - exact[train].mean(axis=0)) / channel_spread(exact[train])
    # scikit-learn's RidgeClassifier is this, at twice the time for so few rows.
    ridge = Ridge(alpha=float(features.shape[1]), solver="cholesky")
    ridge.fit(standard[train], np.where(targets[train], 1.0, -1.0))
    return np.asarray(ridge.predict(standard) > 0, dtype=bool).reshape(targets.shape)


def cross_predictions(features: Array, targets: NDArray[np.bool_], splits: Sequence[Fold]) -> NDArray[np.bool_]:
    """`[row, target]` predictions for rows that the probes were not trained on."""
    said = np.zeros_like(targets)
    for train, test in splits:
        said[test] = predictions(features, targets, train)[test]
    return said


def trained_on(common: Sequence[Mapping[str, float]]) -> list[bool]:
    """For each pair whether probes are trained on it: where the model itself flips the decision.

    Where fewer than half are flipped, all pairs are used; such a model fails the inclusion gate, which reports it.
    """
    flipped = [pair["m_base"] < 0 < pair["m_donor"] for pair in common]
    return flipped if 2 * sum(flipped) >= len(flipped) else [True] * len(flipped)


def prompt_splits(pairs: Sequence[Pair], split: Split, count: int, seed: int, usable: Sequence[bool]) -> list[Fold]:
    """Which prompts a probe is trained on and which it is tested on; each prompt is tested once.

    pair         other pairs, the same skeletons: the paper's folds, which leave a scenario's words in training
    skeleton     other skeletons
    vocabulary   other skeletons, and none that shares a value, an action, a field name or an entity with them
    wording      other skeletons in other wordings of the rule
    field        the pairs' other prompts, which have the same words but the other value in the field: a probe that
                 has learned the words of the rule is wrong in all of them

    Args:
        pairs: prompt `2 * i + side` is the base (0) or the donor (1) of pair i.
        split: what is new in the tested prompts.
        count: of folds, where there is a choice.
        seed: of the folds.
        usable: for each pair, whether it may be trained on.

    Raises:
        SampleError: a fold has no pair to train on.
    """
    if split == "field":
        sides = np.arange(2 * len(pairs)) % 2
        kept = np.repeat(np.asarray(usable, dtype=bool), 2)
        return [_checked(np.flatnonzero(kept & (sides != side)), np.flatnonzero(sides == side)) for side in (0, 1)]
    result = []
    for train, test in _pair_splits(pairs, split, count, seed):
        if not test:
            continue
        chosen = [pair for pair in train if usable[pair]]
        result.append(_checked(_prompts(chosen), _prompts(test)))
    return result


def _pair_splits(pairs: Sequence[Pair], split: Split, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    skeletons = [pair.scenario.skeleton for pair in pairs]
    if split == "pair":
        return folds([str(number) for number in range(len(pairs))], count, seed)
    if split == "vocabulary":
        return folds(_families(pairs), count, seed)
    if split == "skeleton":
        return folds(skeletons, count, seed)
    wordings = [pair.scenario.wording for pair in pairs]
    return [
        ([i for i in train if wordings[i] != wording], [i for i in test if wordings[i] == wording])
        for wording in dict.fromkeys(wordings)
        for train, test in folds(skeletons, _WORDING_FOLDS, seed)
    ]


def _families(pairs: Sequence[Pair]) -> list[str]:
    """For each pair, the label of the group of skeletons that shared words link."""
    names = list(dict.fromkeys(pair.scenario.skeleton for pair in pairs))
    words: list[set[Any]] = [set() for _ in names]
    for pair in pairs:
        own = words[names.index(pair.scenario.skeleton)]
        own |= {pair.base_answer_id, pair.donor_answer_id}
        own |= {context.token_ids[pair.field.start : pair.field.end] for context in (pair.base, pair.donor)}
        own |= {pair.scenario.attributes.get(kind) for kind in ("entity", "field")} - {None}
    shared = np.array([[bool(mine & others) for others in words] for mine in words])
    _, family = connected_components(shared, directed=False)
    return [f"family {family[names.index(pair.scenario.skeleton)]}" for pair in pairs]


def _prompts(pairs: Sequence[int]) -> NDArray[np.intp]:
    return np.array([2 * pair + side for pair in pairs for side in (0, 1)], dtype=np.intp)


def _checked(train: NDArray[np.intp], test: NDArray[np.intp]) -> Fold:
    if not len(train):
        raise SampleError("A probe has no pair to train on in one of its folds; add pairs, skeletons or wordings.")
    return train, test
