"""What a probe is: it decides which interventions to ask for, and what their readings mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
from pydantic import BaseModel, ConfigDict

from kvprobe.registry import Registry
from kvprobe.stats import Effect, StatisticsConfig
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

PROBES: Registry[type[Probe]] = Registry("probe", "kvprobe.probes", "kvprobe.probes")
Progress = Callable[[int, int], None]
Row = dict[str, Any]


class Parameters(BaseModel):
    """Base of all probes' parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class PaperEntry:
    """Where the paper's value of an effect stands in the table of the paper's numbers."""

    experiment: str
    condition: str
    metric: str


@dataclass(frozen=True)
class Panel:
    """What a plot shows of one model.

    Args:
        model: its name.
        effects: by name; empty when the model was not measured or failed the gate.
        rows: the measurements that count.
        paper: the paper's value of an effect, by the effect's name.
        paper_model: the model of the paper they were measured on.
        note: why there are no effects.
    """

    model: str
    effects: Mapping[str, Effect] = field(default_factory=dict)
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    paper: Mapping[str, float] = field(default_factory=dict)
    paper_model: str | None = None
    note: str = ""


class Probe(ABC):
    """Base of all probes: validated parameters, `measure`, `summarise`, `plot` and `plot_main`.

    A probe knows nothing of experiments, claims or files. Its `paper` says which of its effects the paper
    gives a value for. One that selects or trains across skeletons sets `needs_all_pairs`: it is given all pairs
    of a model in one call of `measure`, where others may be given them block by block.
    """

    name: ClassVar[str]
    needs_all_pairs: ClassVar[bool] = False
    paper: ClassVar[Mapping[str, PaperEntry]] = {}
    may_lack: ClassVar[Mapping[str, str]] = {}
    """Why an effect may be missing from a summary, by a pattern of its name (`rome.*`)."""
    Parameters: ClassVar[type[Parameters]] = Parameters
    parameters: Any

    def __init__(self, parameters: Any = None) -> None:
        self.parameters = parameters if parameters is not None else self.Parameters()

    @abstractmethod
    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Row]:
        """Tidy rows, one per measurement, never averaged.

        Every row carries `pair` (index into `pairs`), `m_base` and `m_donor` (margins of the unedited prompts,
        in logits), and may carry `noise_floor`, `mass_base`, `mass_donor`, which the inclusion gate reads. A
        missing value is `None`. `progress(done, total)` may be called at any rate.
        """

    def refusal(self, subject: Subject, pair: Pair) -> str | None:  # noqa: ARG002
        """Why a model cannot be asked at all, as one sentence, from a look at its tokenizer; `None` where it can."""
        return None

    def preview(self, subject: Subject, pair: Pair) -> Mapping[str, float] | None:
        """What the inclusion gate reads of a pair, for two prefills; `None` where only measuring tells.

        By it a model that cannot do the task is refused before anything long is measured on it.
        """
        from kvprobe.probes.unedited import decided

        # A decision after a chain of thought is known when the chain is written.
        return None if pair.scenario.attributes.get("mode") == "think" else decided(subject, pair)

    @abstractmethod
    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Effects of one model, from those of its rows that passed the gate."""

    @abstractmethod
    def plot(self, panels: Sequence[Panel]) -> Figure:
        """One figure over all models."""

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:  # noqa: B027
        """Draw the main result of all models into one axes of the section's figure.

        By default there is none, and a probe that does not define it gets no axes there (`has_main_plot`).
        """

    @classmethod
    def has_main_plot(cls) -> bool:
        """Whether the probe defines `plot_main`."""
        return cls.plot_main is not Probe.plot_main
