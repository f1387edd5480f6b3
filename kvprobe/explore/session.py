"""One model and the states shown on it: every number comes from the functions that an audit and the Python API use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from torch import Tensor

from kvprobe.auditing.measure import FieldRead, read_field, reading
from kvprobe.auditing.methods import methods_to_try
from kvprobe.auditing.prompt import AuditField, AuditPrompt, make_ready
from kvprobe.auditing.result import Dependence
from kvprobe.auditing.verdict import conclude
from kvprobe.edit.base import Edited
from kvprobe.engine.cache import KVCache, LayerKV
from kvprobe.engine.forward import prefill
from kvprobe.engine.interventions import KVPatch
from kvprobe.engine.operations import overwrite
from kvprobe.engine.readout import read as read_logits
from kvprobe.engine.receipt import Receipt
from kvprobe.engine.sweep import run_patches
from kvprobe.errors import ConfigError, UnknownNameError, UnsupportedError
from kvprobe.explore.state import Choice, State
from kvprobe.models.subject import Subject
from kvprobe.probes.kit.decisions import patched_margins
from kvprobe.runs.config import GateConfig

WHERE = "The prompt"
_BLOCK = 32
"""Tokens in one step of the heat, after each of which the page hears of it and may ask for something else."""
_REMEMBERED = 4
Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prompt and one of its fields as the model decides them.

    Attributes:
        prompt: made ready for the model.
        field: that changes.
        read: both prompts' caches and decisions.
        name: of prompt and field, for what is kept of them.
    """

    prompt: AuditPrompt
    field: AuditField
    read: FieldRead
    name: tuple[str, ...]

    @property
    def reach(self) -> range:
        """The positions at which the caches of both values can differ."""
        return range(self.read.pair.field.start, self.read.pair.decision_position)

    @property
    def moves(self) -> bool:
        """Whether the margin goes a way between the two values of which an audit would tell a recovery."""
        return self.read.found.dependence in (Dependence.DEPENDS, Dependence.MARGIN_ONLY)

    @property
    def problem(self) -> str:
        """Why nothing can be concluded of this prompt, in a sentence; empty where something can."""
        found = self.read.found
        return (
            "" if found.dependence is Dependence.DEPENDS else conclude(found, GateConfig().answer_mass).conclusions[0]
        )


@dataclass(frozen=True)
class Decided:
    """A decision.

    Attributes:
        answer: the likeliest.
        probabilities: of each answer in all its spellings, of the whole vocabulary.
        margin: logit of the new value's answer less that of the old value's.
        recovery: of the margin's way to that of the new value; `None` where an audit would tell none.
        says: the likeliest token of all.
    """

    answer: str
    probabilities: dict[str, float]
    margin: float
    recovery: float | None
    says: str


@dataclass(frozen=True, eq=False)
class Tried:
    """What was done to the stale cache: the decision, the cost, and for an edit what it left."""

    decided: Decided
    receipt: Receipt
    edited: Edited | None = None


class _Recent(Generic[Made]):
    """The latest things made, each made once."""

    def __init__(self, most: int) -> None:
        self._most, self._made = most, OrderedDict[tuple, Made]()

    def get(self, name: tuple, make: Callable[[], Made]) -> Made:
        """What was made under a name, or is made now."""
        made = self._made[name] if name in self._made else make()
        self._made[name] = made
        self._made.move_to_end(name)
        while len(self._made) > self._most:
            self._made.popitem(last=False)
        return made


class Session:
    """The states of a page on one model, one at a time; what was measured of the latest prompts is kept.

    Args:
        subject: the model.
        chat: whether prompts stand in the tokenizer's chat template, where it has one.
    """

    def __init__(self, subject: Subject, *, chat: bool = True) -> None:
        self.subject, self.chat = subject, chat
        self.methods = methods_to_try()
        self._ready: _Recent[AuditPrompt] = _Recent(_REMEMBERED)
        self._read: _Recent[Prepared] = _Recent(_REMEMBERED)
        self._tried: _Recent[Tried] = _Recent(4 * _REMEMBERED)
        self._heat: _Recent[list[float]] = _Recent(4 * _REMEMBERED)

    def ready(self, state: State) -> tuple[AuditPrompt, AuditField]:
        """The prompt and the field of a state in the model's tokens; nothing is run.

        Raises:
            ConfigError, AlignmentError: as `make_ready`.
            UnknownNameError: there is no such field.
        """
        content = state.prompt.model_copy(update={"explore": None})
        name, wanted = content.model_dump_json(), state.choice.field
        prompt = self._ready.get((name,), lambda: make_ready(self.subject, content, where=WHERE, chat=self.chat))
        fields = {field.marked.name: field for field in prompt.fields}
        if wanted and wanted not in fields:
            raise UnknownNameError("field", wanted, fields)
        return prompt, fields[wanted] if wanted else prompt.fields[0]

    def prepared(self, state: State) -> Prepared:
        """The prompt and the field of a state, decided with the old and with the new value.

        Raises:
            KvprobeError: see `ready`.
        """
        prompt, field = self.ready(state)
        name = prompt.base.token_hash, field.donor.token_hash, prompt.content.model_dump_json()

        def read() -> Prepared:
            base = prefill(self.subject, prompt.base.token_ids)
            written = prompt.as_written(base.logits)
            found = read_field(self.subject, written, field, GateConfig().answer_mass, base=base)
            return Prepared(written, field, found, name)

        return self._read.get(name, read)

    def unedited(self, prepared: Prepared) -> tuple[Decided, Decided]:
        """The decisions with the old and with the new value."""
        (old, new), found = prepared.read.whole, prepared.read.found
        return (
            self._decided(prepared, old.logits, found.stale.margin),
            self._decided(prepared, new.logits, found.oracle.margin),
        )

    def chosen(self, prepared: Prepared, choice: Choice) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Positions and layers of a choice.

        Raises:
            ConfigError: the prompt has no such cache entry, or the model no such layer.
            UnsupportedError: the values differ in length, so that there is no entry for an entry.
        """
        if prepared.field.uneven:
            raise UnsupportedError(prepared.field.uneven)
        pair, layers = prepared.read.pair, range(self.subject.layers)
        places = pair.field.positions if choice.positions is None else sorted(set(choice.positions))
        outside = [place for place in places if not 0 <= place < pair.decision_position]
        if outside:
            raise ConfigError(
                f"Position {outside[0]} has no cache entry to transplant: those of this prompt are 0 to "
                f"{pair.decision_position - 1}."
            )
        first, last = choice.layers or (0, layers[-1])
        if not 0 <= first <= last <= layers[-1]:
            raise ConfigError(f"There are no layers {first} to {last}: the model has layers 0 to {layers[-1]}.")
        return tuple(places), tuple(range(first, last + 1))

    def transplanted(self, prepared: Prepared, choice: Choice) -> Tried:
        """The decision of the old prompt with the chosen cache entries taken from the one with the new value.

        Raises:
            ConfigError, UnsupportedError: see `chosen`.
        """
        places, layers = self.chosen(prepared, choice)
        pair, donor = prepared.read.pair, self._donor(prepared, choice.part)
        patch = KVPatch(places, donor, layers, no_op=True)
        (logits,) = run_patches(self.subject, pair.base.token_ids, prepared.read.unedited.stale, [patch])
        _, receipt = overwrite(prepared.read.unedited.stale, places, donor, layers, no_op=True)
        return Tried(self._decided(prepared, logits), receipt)

    def edited(self, prepared: Prepared, method: str) -> Tried:
        """An edit of the field by a method of `methods`.

        Raises:
            UnknownNameError: there is no such method.
            UnsupportedError: it cannot make this edit.
        """
        if method not in self.methods:
            raise UnknownNameError("edit method", method, self.methods)

        def tried() -> Tried:
            prompt, field, tokenizer = prepared.prompt, prepared.field, self.subject.tokenizer
            stale = prompt.cached(prompt.base, prepared.read.unedited.stale)
            edited = self.methods[method].apply(self.subject, stale, field.edit(field.marked.new, tokenizer))
            field.check(edited, prompt.base, field.marked.new, tokenizer)
            logits = edited.prompt.decide(self.subject).logits
            return Tried(self._decided(prepared, logits), edited.receipt, edited)

        return self._tried.get((*prepared.name, method), tried)

    def heat(self, prepared: Prepared, choice: Choice) -> Iterator[list[float]]:
        """The recovery of each position of `reach` transplanted alone, as many as are known after each step.

        What a caller that stops early has heard of is not measured again.
        """
        _, layers = self.chosen(prepared, choice)
        donor, unedited, pair = self._donor(prepared, choice.part), prepared.read.unedited, prepared.read.pair
        values = self._heat.get((*prepared.name, choice.part, layers), list)
        base, gap = unedited.base.margin, unedited.donor.margin - unedited.base.margin
        yield values
        while len(values) < len(prepared.reach):
            block = prepared.reach[len(values) : len(values) + _BLOCK]
            patches = [KVPatch((place,), donor, layers, no_op=True) for place in block]
            margins = patched_margins(self.subject, pair, pair.base, unedited.stale, patches)
            values += [(margin - base) / gap for margin in margins]
            yield values

    def _decided(self, prepared: Prepared, logits: Tensor, margin: float | None = None) -> Decided:
        """What logits `[vocab]` decide; the margin is theirs unless it was measured otherwise."""
        pair, found = prepared.read.pair, prepared.read.found
        if margin is None:
            margin = read_logits(logits, pair.base_answer_id, pair.donor_answer_id).margin
        told = reading(self.subject, prepared.prompt, logits, margin)
        chances = logits.double().softmax(-1)
        ids = {
            answer: {spelled[answer] for spelled in prepared.prompt.spelled} for answer in prepared.prompt.answer_ids
        }
        probabilities = {answer: float(chances[list(numbers)].sum()) for answer, numbers in ids.items()}
        way = found.oracle.margin - found.stale.margin
        recovery = (margin - found.stale.margin) / way if prepared.moves else None
        return Decided(told.decision, probabilities, margin, recovery, told.says)

    def _donor(self, prepared: Prepared, part: Literal["both", "keys", "values"]) -> KVCache:
        """The cache of the new value, of which only one part differs from that of the old one if so asked."""
        return mixed(prepared.read.unedited.stale, prepared.read.unedited.oracle, part)


def mixed(base: KVCache, donor: KVCache, part: Literal["both", "keys", "values"]) -> KVCache:
    """A cache of the donor's keys and the base's values, or the other way round."""
    if part == "both":
        return donor
    keys, values = (donor, base) if part == "keys" else (base, donor)
    layers = zip(keys.layers, values.layers, strict=True)
    made = tuple(LayerKV(of_keys.keys, of_values.values, of_keys.source_keys) for of_keys, of_values in layers)
    return KVCache(made, keys.positions, keys.source_positions, keys.axes, keys.source_axes)
