"""What an audit found, as plain data that survives JSON."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvprobe.viewing import Viewable


class Dependence(StrEnum):
    """Whether the model's decision depends on a field."""

    DEPENDS = "depends"
    """The decision changes with the field, as the file says it should."""
    WRONG = "wrong"
    """A decision is not the one that the file calls right."""
    MARGIN_ONLY = "margin only"
    """No decision turns, but the margin moves the right way by many noise floors."""
    SAME = "same"
    """The field does not turn the decision, nor move the margin enough, or the right way, to be followed."""
    NONE = "none"
    """The field moves nothing beyond the noise floor."""
    ELSEWHERE = "elsewhere"
    """The model would say something else: its likeliest token is no answer, and the answers together are unlikely."""
    NOT_ASKED = "not asked"
    """The file says that the decision must not depend on the field, and it does not."""


class Safety(StrEnum):
    """Whether an edit method may be used for a field."""

    SAFE = "safe"
    """The oracle's decision in both directions at nearly its margin or a clearer one, not weakened by a restatement."""
    FRAGILE = "fragile"
    """All decisions are right and a margin falls far short of what it should be."""
    UNSAFE = "unsafe"
    """A decision is wrong."""
    IMPOSSIBLE = "impossible"
    """The method cannot make this edit."""

    @property
    def sign(self) -> str:
        """One character for it."""
        return {"safe": "✓", "fragile": "~", "unsafe": "✗"}.get(self, "–")


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reading(_Plain):
    """One decision.

    Attributes:
        decision: the likeliest of the answers.
        margin: logit of the answer under the new value less that under the old value.
        mass: probability of all answers together.
        says: the token that is likeliest of all.
        says_answer: whether that token is one of the answers.
    """

    decision: str
    margin: float
    mass: float
    says: str
    says_answer: bool


class TokenReading(_Plain):
    """One token; `recovery` when its keys and values alone come from the donor, `None` where nothing can differ."""

    position: int
    text: str
    segment: str
    recovery: float | None


class SetReading(_Plain):
    """Some cache entries transplanted together.

    Attributes:
        name: a segment's, or `field`, `downstream`, `all`, `none`, or `top N` for the strongest single tokens.
        text: what stands there, in short.
        positions: how many entries.
        recovery: of the margin, 1 being that of the donor.
    """

    name: str
    text: str
    positions: int
    recovery: float


class Trial(_Plain):
    """One application of a method: the decision, the oracle's, and how much of the margin's way was gone.

    `recovery` is 1 at the oracle's margin; for a restated value, where it ought to be 0, the share of that way which
    the margin moved.
    """

    decision: str
    oracle: str
    recovery: float

    @property
    def right(self) -> bool:
        """Whether it is the oracle's decision."""
        return self.decision == self.oracle


class MethodReading(_Plain):
    """One edit method on one field.

    Attributes:
        name: with its parameters where they are not the defaults.
        what: one line.
        forward: old to new value.
        backward: new to old value.
        restated: old to old, and new to new; nothing may move.
        tokens: run by the model, counted on its layers, mean over both directions.
        token_share, flops_share, seconds_share: of a full reprefill of the same prompts.
        flops, seconds: mean and median of an edit.
        safety: and why.
    """

    name: str
    what: str
    forward: Trial | None = None
    backward: Trial | None = None
    restated: tuple[Trial, ...] = ()
    tokens: float = 0.0
    token_share: float = 0.0
    flops: float = 0.0
    flops_share: float = 0.0
    seconds: float = 0.0
    seconds_share: float = 0.0
    safety: Safety
    reason: str


class ErratumReading(_Plain):
    """What an erratum would be: its text for the new and the old value, where it goes, and what it does.

    `followed` is to the new value, `followed_back` to the old one; `restated_kept` is whether one that restates the
    value that is there leaves the decision alone.
    """

    line: str
    line_back: str
    before: str
    followed: bool
    followed_back: bool
    restated_kept: bool


class FieldAudit(_Plain):
    """All that was found of one field, changed alone with the others at their old values."""

    name: str
    old: str
    new: str
    old_tokens: tuple[str, ...]
    new_tokens: tuple[str, ...]
    span: tuple[int, int]
    expected: tuple[str, str] | None
    answers: tuple[str, str]
    stale: Reading
    oracle: Reading
    noise_floor: float
    dependence: Dependence
    tokens: tuple[TokenReading, ...] = ()
    segments: tuple[SetReading, ...] = ()
    sets: tuple[SetReading, ...] = ()
    methods: tuple[MethodReading, ...] = ()
    erratum: ErratumReading | None = None
    cheapest: str | None = None
    conclusions: tuple[str, ...] = ()

    @property
    def judged(self) -> bool:
        """Whether anything beyond the dependence was measured."""
        return bool(self.tokens or self.methods)

    def set(self, name: str) -> SetReading:
        """One of `sets` by its name."""
        return next(found for found in self.sets if found.name == name)

    def method(self, name: str) -> MethodReading:
        """One of `methods` by its name."""
        return next(found for found in self.methods if found.name == name)


def brief(text: str, width: int = 60) -> str:
    """The beginning of a text that is longer than a line or a cell has room for."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


class AuditResult(_Plain, Viewable):
    """An audit of one prompt on one model.

    `model_dump_json` and `model_validate_json` are each other's inverse; a notebook shows the page's body.

    Attributes:
        prompt: the file's name for it.
        file: its path.
        text: with every field at its old value.
        token_sha256: of the token ids of that text.
        tokens: how many they are.
        chat: whether it stood in the chat template.
        answers: all possible ones.
        model: its identity.
        code: version, commit and packages.
        fields: in the order of the text.
        warnings: what may not be as meant.
        seconds: that the audit took.
    """

    prompt: str
    file: str
    text: str
    token_sha256: str
    tokens: int
    chat: bool
    answers: tuple[str, ...]
    model: dict[str, Any]
    code: dict[str, Any]
    fields: tuple[FieldAudit, ...]
    warnings: tuple[str, ...]
    seconds: float

    @property
    def caveat(self) -> str:
        """What a single prompt cannot show."""
        floors = max(field.noise_floor for field in self.fields)
        return (
            "One prompt (n = 1): there is no interval, and other prompts may behave differently. "
            f"Noise floor of a margin: {floors:.2g} logits."
        )

    def field(self, name: str) -> FieldAudit:
        """One of `fields` by its name."""
        return next(found for found in self.fields if found.name == name)
