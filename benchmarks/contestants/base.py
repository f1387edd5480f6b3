"""What a way of running sweeps is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.sweeps import HeadRow, KVRow, Row, SuffixRow
from benchmarks.work import Work, prompt_work
from kvprobe.registry import Kind, Registry


class Contestant(ABC):
    """One way of running sweeps on one case; made, with all that may be kept between sweeps, before time is taken.

    Raises:
        ImportError: the library it needs is not installed.
        UnsupportedError: it cannot run this model.
    """

    name: ClassVar[str]
    label: ClassVar[str]

    def __init__(self, case: Case) -> None:
        self.case = case

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Margins `[row]` of rows of one kind, one row after the other."""
        with torch.no_grad():
            return torch.stack([self.margin(row) for row in rows])

    def margin(self, row: Row) -> Tensor:
        """The margin `[]` of one row."""
        match row:
            case KVRow():
                return self.kv(row)
            case HeadRow():
                return self.head(row)
            case SuffixRow():
                return self.suffix(row)

    @abstractmethod
    def kv(self, row: KVRow) -> Tensor:
        """The margin under patched keys and values."""

    @abstractmethod
    def head(self, row: HeadRow) -> Tensor:
        """The margin under the donor's output of a head."""

    @abstractmethod
    def suffix(self, row: SuffixRow) -> Tensor:
        """The margin after another suffix."""

    def work(self, rows: Sequence[Row]) -> Work:
        """FLOPs and bytes that this way of running `rows` cannot do without; by default a whole prompt for each."""
        return prompt_work(self.case).times(len(rows))


CONTESTANTS: Registry[type[Contestant]] = Registry(Kind("contestant", "CONTESTANTS", "benchmarks.contestants"))
REFERENCE = "kvprobe"
