"""Several skills in one prompt, each compiled alone (protocol 6.4): does the one that is asked for still decide?

The skills are spliced one after another, the lines between them run; the session, the conversation and the task follow.
Both prompts of a pair are decided by one full prefill and by composing the very same tokens:

    splice_none, splice_neutral   skills compiled from behind nothing (the paper's way) and a neutral line
    removed                       floor: as splice_neutral, the deciding skill left out

Whether a pair counts at all is settled by its scenario with the deciding skill alone. With more skills a model may fail
by itself: `full_prefill_N.accuracy` says so, and for an N at which it lies below `able` nothing else is told.

    arm_N.agreement, .accuracy, .kl, .cosine, ...   as `fidelity_effects`, with N skills
    arm_N.token_share, .flop_share   run for one prompt, over a full prefill's; compiling is not counted
    first_N.arm.agreement, between_N, last_N   by the place of the deciding skill
    arm.most_less_fewest.agreement, .kl   with the most skills less with the fewest, by scenario
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
from pydantic import Field

from kvprobe.composing.base import Composition, Part, make_scheme
from kvprobe.composing.chunk import Chunk, Header, precompile
from kvprobe.engine.cache import KVCache
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.readout import Readout, read
from kvprobe.engine.receipt import Receipt
from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.fidelity import Judged, fidelity_effects, judged, paired_difference
from kvprobe.probes.kit.measures import pair_noise
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, proportion, ratio_of_sums
from kvprobe.tasks.context import TokenizedContext
from kvprobe.tasks.pairs import Pair
from kvprobe.tasks.skills import separator_name, skill_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

REFERENCE, FLOOR = "full_prefill", "removed"
ARMS: Mapping[str, Header] = {"splice_none": "none", "splice_neutral": "neutral", FLOOR: "neutral"}
"""What each arm's skills were compiled behind."""
PLACES = ("first", "between", "last")
_SHARES = {"token_share": ("tokens", "full_tokens"), "flop_share": ("flops", "full_flops")}


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

    name: ClassVar[str] = "n_skills"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"splice_none_{count}.cosine": PaperEntry("n_skills", f"N{count}", "logit_cosine") for count in (1, 2, 3, 4)
    }
    may_lack: ClassVar[Mapping[str, str]] = {
        "*_[0-9]*.*": "Its own full prefill decides too few of the prompts with that many skills rightly.",
        "*.most_less_fewest.*": "Its own full prefill is able with one number of skills only.",
    }

    class Parameters(base.Parameters):
        """What counts as able."""

        able: float = Field(0.9, ge=0, le=1, description="share that a full prefill must decide rightly at an N")
        equivalence: float = Field(0.1, gt=0, description="share of the mean margin that counts as no difference")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each of its two prompts and each arm.

        Raises:
            ConfigError: a pair does not say its skills, its deciding one or its scenario.
        """
        workshop = _Workshop(subject)
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            rows += [{"pair": index, **row} for row in workshop.pair_rows(pair)]
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """What the full prefill can do with each number of skills, and where it can, what composing makes of it."""
        effects: list[Effect] = []
        able: list[int] = []
        for count in sorted(map(int, rows["skills"].unique())):
            part = rows[rows["skills"] == count]
            once = part[part["arm"] == FLOOR]
            right, clusters = once["reference_margin"] > 0, once[statistics.cluster]
            own = proportion(
                f"{REFERENCE}_{count}.accuracy", right.astype(float), clusters=clusters, statistics=statistics
            )
            effects.append(own)
            if own.estimate >= self.parameters.able:
                able.append(count)
                effects += self._with_count(count, part, statistics)
        effects += _trends(rows[rows["skills"].isin(able)], statistics)
        effects.append(pair_noise(rows, statistics))
        return effects

    def _with_count(self, count: int, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
        for arm, part in rows.groupby("arm", sort=False):
            name, clusters = f"{arm}_{count}", part[statistics.cluster]
            yield from fidelity_effects(name, part, statistics, equivalence=self.parameters.equivalence)
            for effect, (cost, whole) in _SHARES.items():
                yield ratio_of_sums(
                    f"{name}.{effect}", part[cost], part[whole], clusters=clusters, statistics=statistics
                )
            for place, some in part.groupby("place", sort=False):
                yield proportion(
                    f"{place}_{count}.{arm}.agreement",
                    some["agrees"].astype(float),
                    clusters=some[statistics.cluster],
                    statistics=statistics,
                )

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Agreement, right decisions and tokens over the number of skills; one column for each model."""
        from kvprobe.probes.composing.n_skills.figure import draw_n_skills

        return draw_n_skills(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Agreement with the full prefill over the number of skills, all models."""
        from kvprobe.probes.composing.n_skills.figure import n_skills_panel

        n_skills_panel(axes, panels)


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


class _Workshop:
    """Composes prompts; each skill is compiled once, and each scenario is decided once with its skill alone."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._splice = make_scheme("splice")
        self._chunks: dict[tuple[tuple[int, ...], Header], Chunk] = {}
        self._alone: dict[str, tuple[Readout, Readout]] = {}

    def pair_rows(self, pair: Pair) -> Iterator[Measurement]:
        """Rows of one pair: what the gate reads is that of the deciding skill alone."""
        order = order_of(pair)
        references = [self._reference(pair, donor=donor) for donor in (False, True)]
        alone = self._decided_alone(pair, order)
        shared = {
            **gate_columns(*alone, self._noise(pair, order, references[0][0])),
            "skills": len(order.skills),
            "place": order.place,
            "scenario": pair.scenario.attributes["scenario"],
        }
        for arm in ARMS:
            cache, cost = self._composed(pair, order, arm)
            for reference, whole in references:
                after = forward(self.subject, reference.prompt.token_ids[order.end :], cache)
                total = cost + after.receipt
                yield {
                    **shared,
                    "arm": arm,
                    **reference.compare(after.logits),
                    "tokens": total.tokens_appended + total.tokens_recomputed,
                    "full_tokens": whole.tokens_appended,
                    "flops": total.flops,
                    "full_flops": whole.flops,
                }

    def _composed(self, pair: Pair, order: Order, arm: str) -> tuple[KVCache, Receipt]:
        """Everything up to the end of the last skill, which both prompts of the pair share."""
        prompt, parts = pair.base, []
        first = prompt.spans[order.skills[0]].start
        if first:
            parts.append(Part("beginning", prompt.token_ids[:first]))
        for place, name in enumerate(order.skills):
            if arm != FLOOR or name != order.asked:
                parts.append(Part.reused(name, self._chunk(_ids(prompt, name), ARMS[arm])))
            if (between := separator_name(place)) in prompt.spans:
                parts.append(Part(between, _ids(prompt, between)))
        # The last token of a composition is not run, so the caches end where the skills do.
        parts.append(Part("next", prompt.token_ids[order.end : order.end + 1]))
        made = self._splice.compose(self.subject, Composition(tuple(parts)))
        return made.cache, made.receipt

    def _chunk(self, ids: tuple[int, ...], header: Header) -> Chunk:
        if (ids, header) not in self._chunks:
            self._chunks[ids, header] = precompile(self.subject, ids, header)
        return self._chunks[ids, header]

    def _reference(self, pair: Pair, *, donor: bool) -> tuple[Judged, Receipt]:
        result = prefill(self.subject, (pair.donor if donor else pair.base).token_ids)
        return judged(self.subject, pair, donor=donor, logits=result.logits), result.receipt

    def _decided_alone(self, pair: Pair, order: Order) -> tuple[Readout, Readout]:
        scenario = pair.scenario.attributes["scenario"]
        if scenario not in self._alone:
            answers = pair.base_answer_id, pair.donor_answer_id
            both = [
                read(prefill(self.subject, alone(prompt, order)).logits, *answers) for prompt in (pair.base, pair.donor)
            ]
            self._alone[scenario] = both[0], both[1]
        return self._alone[scenario]

    def _noise(self, pair: Pair, order: Order, reference: Judged) -> float:
        """How far the base's margin moves when it is run in two pieces."""
        ids, joint = pair.base.token_ids, order.end
        pieces = forward(self.subject, ids[joint:], prefill(self.subject, ids[:joint]).cache)
        return abs(read(pieces.logits, *reference.answers).margin - reference.reading.margin)


def alone(prompt: TokenizedContext, order: Order) -> tuple[int, ...]:
    """The prompt's tokens with the deciding skill only."""
    spans = prompt.spans
    start = spans[order.skills[0]].start
    return (*prompt.token_ids[:start], *_ids(prompt, order.asked), *prompt.token_ids[order.end :])


def _ids(prompt: TokenizedContext, name: str) -> tuple[int, ...]:
    return prompt.token_ids[prompt.spans[name].start : prompt.spans[name].end]


def _trends(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    counts = sorted(rows["skills"].unique())
    if len(counts) < 2:
        return
    ends = counts[-1], counts[0]
    for arm, part in rows.groupby("arm", sort=False):
        for effect, column, unit in (("agreement", "agrees", "fraction"), ("kl", "kl", "nats")):
            name = f"{arm}.most_less_fewest.{effect}"
            yield from paired_difference(
                name, part, column, ends, statistics, by="skills", within="scenario", unit=unit
            )
