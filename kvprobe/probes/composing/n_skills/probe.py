"""Several skills in one prompt, each compiled alone (protocol 6.4): does the one that is asked for still decide?

The skills are spliced one after another, the lines between them run; the session, the conversation and the task follow.
Both prompts of a pair are decided by one full prefill and by composing the very same tokens:

    splice_none, splice_neutral   skills compiled behind nothing (the paper's way) and behind a neutral line
    removed                       floor: as splice_neutral, the deciding skill left out

Whether a pair counts at all is settled by its scenario with the deciding skill alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from kvprobe.composing.base import Composition, Part, make_scheme
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError
from kvprobe.probes.base import PROBES, Measurement, Probe, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.fidelity import REMOVED, ChunkStore, Reference, ReuseArm, reference_of
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.skills import separator_name, skill_name

if TYPE_CHECKING:
    from kvprobe.models.subject import Subject

_SPLICE = make_scheme("splice")
ARMS = (
    ReuseArm("splice_none", _SPLICE),
    ReuseArm("splice_neutral", _SPLICE, "neutral"),
    ReuseArm(REMOVED, _SPLICE, "neutral", "nothing"),
)
PLACES = ("first", "between", "last")


@dataclass(frozen=True, eq=False)
class Order:
    """Where the skills stand in a prompt.

    Attributes:
        skills: names of their segments, in order.
        asked: name of the deciding one.
        end: token position behind the last one.
    """

    skills: tuple[str, ...]
    asked: str
    end: int

    @property
    def place(self) -> str:
        """Whether the deciding skill is the `first`, the `last` or `between`; one alone is first."""
        number = self.skills.index(self.asked)
        return PLACES[0] if not number else PLACES[2] if number == len(self.skills) - 1 else PLACES[1]


@PROBES.register("n_skills")
class NSkills(Probe):
    """Decisions of prompts composed from several skills against full prefills, by the number of skills."""

    able: float = Field(0.9, ge=0, le=1, description="least accuracy of the full prefill at an N that is reported")
    equivalence: float = Field(0.1, gt=0, description="share of the mean margin that counts as no difference")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each of its two prompts and each arm.

        Raises:
            ConfigError: a pair does not say its skills, its deciding one or its scenario.
        """
        chunks, alone = ChunkStore(subject), dict[str, tuple[Readout, Readout]]()
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            order, scenario = order_of(pair), pair.scenario.attributes["scenario"]
            # A scenario decides the same with its skill alone, however many skills stand beside it.
            alone[scenario] = alone.get(scenario) or decided_alone(subject, pair, order)
            rows += [{"pair": index, **row} for row in _pair_rows(subject, pair, order, alone[scenario], chunks)]
            progress(index + 1, len(pairs))
        return rows


def order_of(pair: Pair) -> Order:
    """Where a pair's skills stand.

    Raises:
        ConfigError: it does not say, or they do not come before the field.
    """
    attributes = pair.scenario.attributes
    missing = [key for key in ("skills", "place", "scenario") if key not in attributes]
    if missing:
        raise ConfigError(f"Composing several skills needs pairs that say their {missing[0]}: use task skills.")
    skills = tuple(skill_name(place) for place in range(int(attributes["skills"])))
    if pair.base.spans[skills[-1]].end > pair.field.start:
        raise ConfigError("The skills must come before the field, for they are the same in both prompts.")
    return Order(skills, skill_name(int(attributes["place"])), pair.base.spans[skills[-1]].end)


def decided_alone(subject: Subject, pair: Pair, order: Order) -> tuple[Readout, Readout]:
    """The decisions of both prompts with the deciding skill only."""
    answers = pair.base_answer_id, pair.donor_answer_id
    base, donor = (read(prefill(subject, alone(p, order)).logits, *answers) for p in (pair.base, pair.donor))
    return base, donor


def alone(prompt: TokenizedContext, order: Order) -> tuple[int, ...]:
    """The prompt's tokens with the deciding skill only."""
    start = prompt.spans[order.skills[0]].start
    return (*prompt.token_ids[:start], *_ids(prompt, order.asked), *prompt.token_ids[order.end :])


def composed_skills(
    subject: Subject, prompt: TokenizedContext, order: Order, arm: ReuseArm, chunks: ChunkStore
) -> tuple[KVCache, Receipt]:
    """Everything up to the end of the last skill, which both prompts of a pair share, and what composing it cost."""
    first, parts = prompt.spans[order.skills[0]].start, []
    if first:
        parts.append(Part("beginning", prompt.token_ids[:first]))
    for place, name in enumerate(order.skills):
        if arm.content != "nothing" or name != order.asked:
            parts.append(Part.reused(name, chunks.chunk(_ids(prompt, name), arm.header)))
        if (between := separator_name(place)) in prompt.spans:
            parts.append(Part(between, _ids(prompt, between)))
    # The last token of a composition is not run, so the cache ends where the skills do.
    parts.append(Part("next", prompt.token_ids[order.end : order.end + 1]))
    made = arm.scheme.compose(subject, Composition(tuple(parts)))
    return made.cache, made.receipt


def _pair_rows(
    subject: Subject, pair: Pair, order: Order, gate: tuple[Readout, Readout], chunks: ChunkStore
) -> Iterator[Measurement]:
    """Rows of one pair: what the inclusion gate reads is that of the deciding skill alone."""
    wholes = [prefill(subject, prompt.token_ids) for prompt in (pair.base, pair.donor)]
    references = [
        reference_of(subject, pair, donor=bool(side), logits=whole.logits) for side, whole in enumerate(wholes)
    ]
    shared = {
        **gate_columns(*gate, _noise(subject, pair, order, references[0])),
        "skills": len(order.skills),
        "place": order.place,
        "scenario": pair.scenario.attributes["scenario"],
    }
    for arm in ARMS:
        cache, cost = composed_skills(subject, pair.base, order, arm, chunks)
        for reference, whole in zip(references, wholes, strict=True):
            after = forward(subject, reference.prompt.token_ids[order.end :], cache)
            total = cost + after.receipt
            yield {
                **shared,
                "arm": arm.name,
                **reference.compare(after.logits),
                "tokens": total.tokens_appended + total.tokens_recomputed,
                "full_tokens": whole.receipt.tokens_appended,
                "flops": total.flops,
                "full_flops": whole.receipt.flops,
            }


def _noise(subject: Subject, pair: Pair, order: Order, reference: Reference) -> float:
    """How far the base's margin moves when it is run in two pieces."""
    ids, joint = pair.base.token_ids, order.end
    pieces = forward(subject, ids[joint:], prefill(subject, ids[:joint]).cache)
    return abs(read(pieces.logits, *reference.answers).margin - reference.reading.margin)


def _ids(prompt: TokenizedContext, name: str) -> tuple[int, ...]:
    return prompt.token_ids[prompt.spans[name].start : prompt.spans[name].end]
