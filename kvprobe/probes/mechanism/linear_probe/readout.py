"""What a probe of the decision token reads there on edited caches (protocol 1.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvprobe.engine.operations import overwrite
from kvprobe.probes.kit.decoding import Array, Fold, predictions, residuals
from kvprobe.probes.kit.pair_lines import subjects_of
from kvprobe.probes.kit.prefilled_pair import PrefilledPair
from kvprobe.probes.kit.rule_positions import segment
from kvprobe.tasks.extra_lines import line_tokens
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

ARMS = ("stale", "in_place", "erratum", "full")


def decision_residuals(subject: Subject, pair: Pair, unedited: PrefilledPair) -> dict[str, Array]:
    """By arm, the decision token's residual stream `[layer, hidden]` on caches with and without the base's notes.

    stale      the base's cache
    in_place   the base's cache with the field's entries of the donor (protocol 5.1: equal to recomputing them)
    erratum    the base's cache up to the task, then the one-line erratum and the task, run anew
    full       the donor's cache
    """
    before, ids = slice(0, pair.decision_position), pair.base.token_ids
    in_place, _ = overwrite(unedited.stale, pair.field, unedited.oracle)
    task = segment(pair, "task").start
    rerun = [*line_tokens("override", subjects_of(pair), subject.tokenizer), *ids[task:]]
    runs = {
        "stale": (ids[-1:], unedited.stale.take(before)),
        "in_place": (ids[-1:], in_place.take(before)),
        "erratum": (rerun, unedited.stale.take(slice(0, task))),
        "full": (ids[-1:], unedited.oracle.take(before)),
    }
    return {arm: residuals(subject, tokens, [-1], cache)[0] for arm, (tokens, cache) in runs.items()}


def says_new(
    features: Array, arms: Mapping[str, Array], target: NDArray[np.bool_], splits: Sequence[Fold]
) -> dict[str, NDArray[np.bool_]]:
    """By arm `[pair, layer]`: whether a probe of other skeletons reads the donor's conclusion.

    Args:
        features: `[prompt, layer, hidden]` of the unedited prompts, which the probes are trained on.
        arms: by arm `[pair, layer, hidden]`.
        target: `[prompt]` the conclusions.
        splits: of the prompts.
    """
    donor = target[1::2]
    said = {arm: np.zeros(residual.shape[:2], dtype=bool) for arm, residual in arms.items()}
    truth = np.concatenate([target, *[donor] * len(arms)])[:, None]
    for layer in range(features.shape[1]):
        rows = np.concatenate([features[:, layer], *(arm[:, layer] for arm in arms.values())])
        for train, test in splits:
            pairs = np.unique(test // 2)
            read = predictions(rows, truth, train)[len(target) :, 0].reshape(len(arms), len(donor))
            for arm, conclusion in zip(said, read, strict=True):
                said[arm][pairs, layer] = conclusion[pairs] == donor[pairs]
    return said
