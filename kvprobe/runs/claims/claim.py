"""Claims of an experiment's YAML, fixed before the run: kind, statement, source and the paper's values."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvprobe.models.catalogue import standing
from kvprobe.runs.claims.statement import Statement, parse_statement

SAME = "same"
"""Key of `calibration` for a claim that comes out alike on the hand-set models."""


class ClaimKind(StrEnum):
    """Whose statement a claim is."""

    PAPER = "paper"
    """The paper states it, with its value."""
    CRITIQUE = "critique"
    """Our own control."""
    IDENTITY = "identity"
    """True by construction or implied by the gate: a check of the implementation."""
    COST = "cost"
    """Tokens, bytes, seconds, arithmetic of a layout."""


_OUTCOMES = ("holds", "fails", "open", "needs more pairs", "not applicable")


class Claim(BaseModel):
    """One claim of an experiment's YAML.

    Args:
        id: unique in the experiment.
        kind: whose statement it is.
        statement: see `parse_statement`.
        source: where the paper makes it, such as `section 3.1`.
        paper_value: the paper's number where one stands for all models.
        paper_values: the paper's number by its own model; a model of the same architecture is set beside it.
        models: the models it is about, a paper's model standing for all of its architecture; empty: all of the
            experiment.
        headline: whether it belongs to the family whose error Holm's method controls.
        calibration: its outcome on each model whose weights are set by hand (`note-taker: holds`); `same` with the
            reason where it cannot tell them apart.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    kind: ClaimKind | None = None
    statement: str
    source: str = ""
    paper_value: float | None = None
    paper_values: dict[str, float] = Field(default_factory=dict)
    models: list[str] = Field(default_factory=list)
    headline: bool = False
    calibration: dict[str, str] = Field(default_factory=dict)

    @field_validator("statement")
    @classmethod
    def _readable(cls, text: str) -> str:
        parse_statement(text)
        return text

    @field_validator("calibration")
    @classmethod
    def _outcomes(cls, declared: dict[str, str]) -> dict[str, str]:
        for model, outcome in declared.items():
            if model == SAME and not outcome.strip():
                raise ValueError("give the reason why the claim cannot tell the hand-set models apart after 'same'")
            if model != SAME and outcome not in _OUTCOMES:
                raise ValueError(f"{outcome!r} is no outcome; write one of: {', '.join(_OUTCOMES)}")
        return declared

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        if self.paper_value is not None and self.paper_values:
            raise ValueError("give either paper_value or paper_values, not both")
        if self.kind is ClaimKind.IDENTITY and self.headline:
            raise ValueError("an identity checks the implementation and is no headline; remove 'headline'")
        if self.kind is ClaimKind.PAPER:
            self._refuse_what_the_paper_violates()
        return self

    @property
    def parsed(self) -> Statement:
        """The statement as a region."""
        return parse_statement(self.statement)

    @property
    def same(self) -> str:
        """Why it comes out alike on the hand-set models; empty where it tells them apart."""
        return self.calibration.get(SAME, "")

    @property
    def tells_apart(self) -> bool:
        """Whether it may come out otherwise on a model that takes no notes; false where it is declared not to."""
        declared = {outcome for model, outcome in self.calibration.items() if model != SAME}
        return not self.same and not (len(self.calibration) > 1 and len(declared) == 1)

    def about(self, model: str, paper_model: str | None) -> bool:
        """Whether it is about a model, which the paper's model `paper_model` shares its architecture with."""
        return not self.models or model in self.models or paper_model in self.models

    def paper_value_of(self, model: str, paper_model: str | None) -> tuple[float | None, bool]:
        """The paper's value for a model, and whether it is of that model or of the paper's of its architecture."""
        for name in (model, paper_model):
            if name in self.paper_values:
                return self.paper_values[name], True
        return self.paper_value, False

    def _refuse_what_the_paper_violates(self) -> None:
        concerned = {*self.models, *(standing(model).paper_model for model in self.models)}
        values = {name: value for name, value in self.paper_values.items() if not self.models or name in concerned}
        told = [(f" for {name}", value) for name, value in values.items()]
        told += [("", self.paper_value)] if self.paper_value is not None else []
        if not told:
            raise ValueError(
                "a claim of kind 'paper' needs the paper's value; give paper_values, or call it a critique"
            )
        for model, value in told:
            if not self.parsed.satisfied_by(value):
                raise ValueError(
                    f"the paper's own value {value:g}{model} violates {self.statement!r}; name the models it is "
                    "about, move the bound to what the paper supports, or call it a critique"
                )
