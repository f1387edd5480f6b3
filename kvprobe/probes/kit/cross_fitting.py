"""Cross-fitting: what is selected on some skeletons is evaluated on others (issue 3, rules for all)."""

from __future__ import annotations

from collections.abc import Sequence

from sklearn.model_selection import GroupKFold

from kvprobe.errors import SampleError


def folds(skeletons: Sequence[str], count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Splits of the rows such that each row is evaluated once, by what was selected without its skeleton.

    Which skeletons go together depends on their names and the seed alone, not on the order or number of rows.

    Args:
        skeletons: of each row.
        count: of folds, 2 at least.
        seed: of the assignment.

    Returns:
        For each fold the indices of the selection rows and of the evaluation rows, both in order.

    Raises:
        SampleError: there are fewer skeletons than folds.
    """
    distinct = len(set(skeletons))
    if distinct < count:
        raise SampleError(
            f"Cross-fitting in {count} folds needs {count} skeletons and there are {distinct}: add pairs."
        )
    splitter = GroupKFold(n_splits=count, shuffle=True, random_state=seed)
    return [
        (selection.tolist(), evaluation.tolist())
        for selection, evaluation in splitter.split(range(len(skeletons)), groups=list(skeletons))
    ]
