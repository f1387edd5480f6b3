"""What can be done with each architecture, as the tests have found it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

Status = Literal["exact", "adapter", "rounded", "partial", "refused"]

OPERATIONS = ("edit", "recompute", "move and splice", "knockout")
"""The columns of the matrix; each is a law in `tests/models/support_laws.py`."""

MEANING: dict[Status, str] = {
    "exact": "equal to a plain forward pass with nothing known of the architecture but its modules",
    "adapter": "equal to a plain forward pass, and without the architecture's adapter it is not",
    "rounded": "equal to a plain forward pass but for the rounding of the stored cache",
    "partial": "equal to a plain forward pass, by running again all but a small part, which alone is saved",
    "refused": "refused with an error that says why",
}
MATRIX = "support.json"


@dataclass(frozen=True)
class Support:
    """One row of the matrix.

    Attributes:
        architecture: `model_type`, with what matters in its configuration.
        cells: one status per operation, in the order of `OPERATIONS`.
        reason: what the adapter does, why it is refused, how little is saved or how it is rounded.
    """

    architecture: str
    cells: tuple[Status, ...]
    reason: str


def support_matrix() -> list[Support]:
    """All rows: those the tests measured, then the architectures that are refused as a whole."""
    from kvprobe.models.architectures.base import ARCHITECTURES
    from kvprobe.models.architectures.refused import REFUSED

    measured = json.loads(files("kvprobe.models").joinpath(MATRIX).read_text(encoding="utf-8"))
    described = ARCHITECTURES.describe()
    rows = [
        Support(name, tuple(row["cells"]), row.get("reason") or described.get(name, ""))
        for name, row in measured.items()
    ]
    refused: tuple[Status, ...] = tuple("refused" for _ in OPERATIONS)
    return rows + [Support(name, refused, REFUSED[name]) for name in sorted(set(REFUSED) - set(measured))]
