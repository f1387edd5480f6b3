"""What a probe is: it measures interventions (`Probe`), and its `Reading` says what the measurements mean.

A probe is a folder. `probe.py` measures and reads like its protocol; it determines a stored cell. `reading.py` turns
rows into effects and a figure; a changed label or estimator there measures nothing again.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.spec import FigureSpec, draw
from kvprobe.registry import KINDS, Registry
from kvprobe.stats import Effect, Sample
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

PROBES: Registry[type[Probe]] = Registry(KINDS["PROBES"])
Progress = Callable[[int, int], None]
"""Called with how much is done, of how much."""
Measurement = dict[str, Any]
"""One row of a probe's table."""
Share = Annotated[float, Field(gt=0, le=1)]
"""Of what is divided, not none of it."""
MOST = 100_000
"""What no whole number among a probe's parameters may exceed: sizes, draws, tokens."""
_OF_ITS_OWN_BOUNDS = re.compile(r"seed|.*_(seed|bytes)|vectors")


class Probe(BaseModel, ABC):
    """Base of all probes: its fields are its validated parameters.

    A probe knows nothing of experiments, claims or files. One that selects or trains across skeletons sets
    `needs_all_pairs`: it is given all pairs of a model in one call of `measure`, others block by block.

    Its reading is `READING` of the module `reading` beside its own, or what it sets as `reading`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    needs_all_pairs: ClassVar[bool] = False
    reading: ClassVar[Reading | None] = None

    @model_validator(mode="after")
    def _can_be_measured(self) -> Self:
        for name, value in _values(self):
            if isinstance(value, int) and not 0 <= value <= MOST and not _OF_ITS_OWN_BOUNDS.fullmatch(name):
                raise ValueError(f"{name} must be from 0 to {MOST:,}")
            if isinstance(value, tuple) and len(set(map(repr, value))) < len(value):
                raise ValueError(f"{name} names something twice")
        return self

    @abstractmethod
    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
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

        It lets a model that cannot do the task be refused before anything long is measured.
        """
        from kvprobe.probes.gating import decided

        # A decision after a chain of thought is known only once the chain is written.
        return None if pair.scenario.attributes.get("mode") == "think" else decided(subject, pair)

    @classmethod
    def read_by(cls) -> Reading:
        """The probe's reading.

        Raises:
            ImportError: the probe sets none, and there is no module `reading` beside its own.
        """
        if cls.reading is not None:
            return cls.reading
        reading: Reading = importlib.import_module(f"{cls.__module__.rpartition('.')[0]}.reading").READING
        return reading


def _values(parameters: BaseModel) -> Iterator[tuple[str, Any]]:
    """All parameters by name, with each member of those that are several."""
    for name, value in parameters:
        yield name, value
        if isinstance(value, BaseModel):
            yield from _values(value)
        elif isinstance(value, tuple):
            yield from ((name, member) for member in value)


@dataclass(frozen=True)
class Reading:
    """What the rows of a probe mean: effects and a figure.

    Args:
        effects: those of one model, from the sample of its rows that count and the probe with its parameters. Given
            part of the rows, it yields the effects that these rows suffice for.
        figure: of all models; a function of the panels where its rows depend on what was measured.
        paper: which of the effects the paper gives a value for, by name.
        may_lack: why an effect may be missing, by a pattern of its name (`rome.*`).
        finding: one sentence that opens reports, with names of effects in braces where their numbers go; empty for
            probes that are not a section's main result.
        names: of all effects that the probe with its parameters can make of any model, so that a claim on another is
            refused before anything is measured; `{layer}` stands for a number and `*` for a word that only model or
            prompt tell. Without it a claim is held against the first model's effects.
        step: place in the section's argument, from 1: these experiments make its main figure and open its report, in
            this order; the others are its supplement.
    """

    effects: Callable[[Sample, Any], Iterable[Effect]]
    figure: FigureSpec | Callable[[Sequence[Panel]], FigureSpec]
    paper: Mapping[str, PaperEntry] = field(default_factory=dict)
    may_lack: Mapping[str, str] = field(default_factory=dict)
    finding: str = ""
    step: int = 0
    names: Callable[[Any], Iterable[str]] | None = None

    def read(self, probe: Probe, sample: Sample) -> list[Effect]:
        """All effects of one model.

        Raises:
            ValueError: two effects have one name.
        """
        effects = list(self.effects(sample, probe))
        names = [effect.name for effect in effects]
        if len(set(names)) < len(names):
            raise ValueError(f"two effects are named {next(name for name in names if names.count(name) > 1)!r}")
        return effects

    def declared(self, probe: Probe) -> list[str] | None:
        """Names of all effects that the probe can make; `None` where the reading does not say."""
        return None if self.names is None else list(dict.fromkeys(self.names(probe)))

    def spec(self, panels: Sequence[Panel] = ()) -> FigureSpec:
        """The figure of these models."""
        return self.figure if isinstance(self.figure, FigureSpec) else self.figure(panels)

    def draw(self, panels: Sequence[Panel]) -> Figure:
        """One figure over all models."""
        return draw(self.spec(panels), panels)

    @property
    def has_main(self) -> bool:
        """Whether the probe has axes in its section's figure."""
        return self.spec().main is not None

    def draw_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Draw the main result of all models into one axes of the section's figure."""
        if main := self.spec(panels).main:
            main.draw(axes, panels)
