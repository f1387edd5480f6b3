"""Fidelity of composed prompts (protocol 6.2, critique CO1, CO3, CO6, G8): does a composed prompt decide as a prefill?

Both prompts of every pair are decided by one full prefill and by composing the very same tokens from the rule, compiled
elsewhere, and all else, run in order. Where the rule stands before the field it is self-contained; in slot `start` the
notes that the rule takes of the field are missing from a rule that was compiled without it: it is coupled.

    splice_none, splice_bos, splice_neutral   moved there from behind nothing, the beginning of a text, a neutral line
    splice_real    from behind what stands before it here: the upper bound
    seam_N         as splice_neutral, its first N tokens run where they stand
    epic, prompt_cache, cacheblend_P   as `kvprobe.composing`, from behind nothing, as published
    relative       compiled behind another prompt's beginning of another length and slid by the difference (CacheSlide)
    no_rotation    as splice_none, keys left at the positions they were computed at
    wrong_chunk, shuffled, removed   floors: another scenario's rule, the rule's tokens shuffled, no rule
    full_prefill   the ceiling: the same prompt run in pieces

KVLink is not among them: it needs link tokens trained into the model, which no model here has.

`X` in an effect's name is `self_contained` or `coupled`; each arm has the effects of `fidelity_effects`, and

    X.arm.token_share               tokens run to compose, over those of a prefill; compiling is not counted
    X.arm.cosine_above_wrong_chunk  cosine less that of the wrong chunk in the same prompt
    X.rotation.cosine_gain, .agreement_gain, .kl_gain   splice_none less no_rotation (kl: the other way round)
    coupling.agreement_loss         agreement of splice_neutral where self-contained less where coupled, by scenario
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pandas as pd
import torch
from pydantic import Field

from kvprobe.composing.base import ReuseScheme, make_scheme
from kvprobe.composing.chunk import Chunk, Header, beginning_of_text, compile_behind, precompile
from kvprobe.engine.forward import prefill
from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.kit.legacy_fidelity import Judged, decide_behind, fidelity_effects, judge, paired_difference
from kvprobe.probes.kit.measures import pair_noise
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, mean, ratio_of_sums
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.models.subject import Subject

CONDITIONS = ("self_contained", "coupled")
FLOORS = ("wrong_chunk", "shuffled", "removed")
CEILING = "full_prefill"
CHUNK = "policy"


@dataclass(frozen=True, eq=False)
class ReuseArm:
    """A way of composing: how the chunk is put there, what it was compiled behind, and what it says.

    Attributes:
        says: `own` rule, a `wrong` one, its tokens `shuffled`, or `nothing`.
        elsewhere: whether it is compiled behind another prompt's beginning, in place of a header.
    """

    name: str
    scheme: ReuseScheme
    header: Header = "none"
    says: str = "own"
    elsewhere: bool = False


@PROBES.register("transplant")
class Transplant(Probe):
    """How far composed prompts decide as a full prefill, by reuse scheme, beside floors and a ceiling."""

    name: ClassVar[str] = "transplant"
    # The wrong chunk and the other beginning come from other pairs.
    needs_all_pairs: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        "self_contained.splice_none.agreement": PaperEntry("context_coupling", "self_contained", "agreement"),
        "coupled.splice_none.agreement": PaperEntry("context_coupling", "context_coupled", "agreement"),
        "self_contained.splice_none.accuracy": PaperEntry("transplant_domains", "all8", "transplant_correct"),
        "self_contained.splice_none.cosine": PaperEntry("transplant_domains", "all8", "mean_logit_cosine"),
        "self_contained.no_rotation.cosine": PaperEntry("transplant_domains", "all8/no_rotation", "mean_logit_cosine"),
    }
    may_lack: ClassVar[Mapping[str, str]] = {
        "*.splice_bos.*": "The tokenizer has no token for the beginning of a text.",
        "*.relative.*": "No other prompt of that slot has another length before the rule.",
        "self_contained.*": "No prompt of the task has the rule before the field.",
        "coupled.*": "No prompt of the task has the field before the rule.",
        "coupling.*": "The task has only one of self-contained and coupled rules.",
        "*.kappa": "The reference gives one of the answers in fewer than a fifth of the prompts.",
    }

    class Parameters(base.Parameters):
        """Sizes of the repairing schemes."""

        seam: int = Field(8, ge=1, description="first tokens of the chunk that the seam arm and EPIC run")
        share: float = Field(0.15, gt=0, le=1, description="of the chunk's tokens that the CacheBlend arm recomputes")
        slot: int = Field(32, ge=1, description="prompt_cache puts the chunk at a multiple of this position")
        equivalence: float = Field(0.1, gt=0, description="share of the mean margin that counts as no difference")
        seed: int = Field(0, ge=0, description="of the shuffled tokens")

    def arms(self) -> list[ReuseArm]:
        """All arms, the floors and the ceiling last."""
        own, splice = self.parameters, make_scheme("splice")
        blend = f"cacheblend_{round(100 * own.share)}"
        return [
            *(ReuseArm(f"splice_{header}", splice, header) for header in ("none", "bos", "neutral", "real")),
            ReuseArm(f"seam_{own.seam}", make_scheme("splice", seam=own.seam), "neutral"),
            ReuseArm("epic", make_scheme("epic", tokens=own.seam)),
            ReuseArm("prompt_cache", make_scheme("prompt_cache", slot=own.slot)),
            ReuseArm(blend, make_scheme("cacheblend", share=own.share)),
            ReuseArm("relative", splice, elsewhere=True),
            ReuseArm("no_rotation", make_scheme("no_rotation")),
            ReuseArm("wrong_chunk", splice, "neutral", "wrong"),
            ReuseArm("shuffled", splice, "neutral", "shuffled"),
            ReuseArm("removed", splice, says="nothing"),
            ReuseArm(CEILING, make_scheme("full_prefill")),
        ]

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each of its two prompts and each arm that the model and the pairs allow.

        Raises:
            ConfigError: a pair does not say its slot, or has no segment `policy`.
        """
        generator = torch.Generator().manual_seed(self.parameters.seed)
        rows: list[Measurement] = []
        for index in range(len(pairs)):
            made = self._pair_rows(_Chunks(subject, pairs, index, generator))
            gate = _gate(made)
            rows += [{"pair": index, **gate, **row} for row in made]
            progress(index + 1, len(pairs))
        return rows

    def _pair_rows(self, chunks: _Chunks) -> list[Measurement]:
        subject, pair = chunks.subject, chunks.pair
        shared = {"condition": condition_of(pair), "scenario": pair.scenario.attributes.get("scenario")}
        rows: list[Measurement] = []
        for judged in judge(subject, pair):
            ids, at = judged.prompt.token_ids, judged.prompt.spans[CHUNK]
            before = prefill(subject, ids[: at.start]).cache if at.start else None
            common = {"reference_mass": judged.reading.mass, "full_tokens": len(ids) - 1}
            for arm in self.arms():
                if not chunks.has(arm):
                    continue
                chunk = chunks.chunk(judged, arm)
                logits, run = decide_behind(subject, before, arm.scheme, chunk, ids[at.end :])
                row = {**common, **judged.compare(logits), "tokens": at.start + run}
                rows.append({**shared, "arm": arm.name, **row})
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Fidelity of every arm where the rule is self-contained and where it is coupled, contrasts, the noise."""
        effects: list[Effect] = []
        for condition, part in rows.groupby("condition", sort=False):
            for arm, some in part.groupby("arm", sort=False):
                name, bound = f"{condition}.{arm}", self.parameters.equivalence
                effects += fidelity_effects(name, some, statistics, equivalence=bound)
                effects.append(_token_share(name, some, statistics))
                effects += _above_wrong_chunk(name, str(arm), part, statistics)
            effects += _rotation(str(condition), part, statistics)
        effects += _coupling(rows, statistics)
        effects.append(pair_noise(rows, statistics))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Agreement, divergence and cosine of every arm; one column for each model."""
        from kvprobe.probes.composing.transplant.figure import draw_transplant

        return draw_transplant(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Agreement with the full prefill, self-contained and coupled, all models."""
        from kvprobe.probes.composing.transplant.figure import transplant_panel

        transplant_panel(axes, panels)


def condition_of(pair: Pair) -> str:
    """Whether a pair's rule is `self_contained` (it stands before the field) or `coupled`.

    Raises:
        ConfigError: the pair has no segment `policy`.
    """
    if CHUNK not in pair.base.spans:
        raise ConfigError("The probe transplant composes prompts from their rule: use task field_position.")
    return CONDITIONS[pair.base.spans[CHUNK].start > pair.field.start]


class _Chunks:
    """The chunks of one pair, each compiled once; `real` ones once for each prompt."""

    def __init__(self, subject: Subject, pairs: Sequence[Pair], index: int, generator: torch.Generator) -> None:
        self.subject, self.pair = subject, pairs[index]
        condition_of(self.pair)
        span = self.pair.base.spans[CHUNK]
        self._own = self.pair.base.token_ids[span.start : span.end]
        others = [pairs[(index + step) % len(pairs)] for step in range(1, len(pairs))]
        self._wrong = _wrong_rule(self.pair, others)
        self._elsewhere = _other_beginning(self.pair, others)
        order = torch.randperm(len(self._own), generator=generator).tolist()
        self._shuffled = tuple(self._own[place] for place in order)
        self._made: dict[tuple[Header, str], Chunk] = {}

    def has(self, arm: ReuseArm) -> bool:
        """Whether the model and the pairs have what the arm needs."""
        if arm.header == "bos":
            return bool(beginning_of_text(self.subject.tokenizer))
        return bool(self._elsewhere) if arm.elsewhere else arm.says != "wrong" or bool(self._wrong)

    def chunk(self, judged: Judged, arm: ReuseArm) -> Chunk | None:
        """The arm's chunk; None for the arm without a rule."""
        if arm.says == "nothing":
            return None
        if arm.elsewhere or arm.header == "real":
            ahead = self._elsewhere if arm.elsewhere else judged.prompt.token_ids[: judged.prompt.spans[CHUNK].start]
            return compile_behind(self.subject, self._own, "real", ahead)
        if (arm.header, arm.says) not in self._made:
            ids = {"own": self._own, "wrong": self._wrong, "shuffled": self._shuffled}[arm.says]
            self._made[arm.header, arm.says] = precompile(self.subject, ids, arm.header)
        return self._made[arm.header, arm.says]


def _wrong_rule(pair: Pair, others: Sequence[Pair]) -> tuple[int, ...]:
    """The rule of the next pair of another scenario, of the same condition if there is one."""
    found = [other for other in others if other.scenario.skeleton != pair.scenario.skeleton]
    same = [other for other in found if condition_of(other) == condition_of(pair)] or found
    return same[0].base.token_ids[same[0].base.spans[CHUNK].start : same[0].base.spans[CHUNK].end] if same else ()


def _other_beginning(pair: Pair, others: Sequence[Pair]) -> tuple[int, ...]:
    """What stands before the rule in the next pair of that condition where it has another length."""
    length = pair.base.spans[CHUNK].start
    for other in others:
        start = other.base.spans[CHUNK].start
        if condition_of(other) == condition_of(pair) and start not in (0, length):
            return other.base.token_ids[:start]
    return ()


def _gate(rows: Sequence[Measurement]) -> Measurement:
    """What the inclusion gate reads, from the rows of both prompts; the noise is that of the ceiling."""
    margins = {row["prompt"]: row for row in rows if row["arm"] == CEILING}
    base_row, donor_row = margins["base"], margins["donor"]
    return {
        "m_base": -base_row["reference_margin"],
        "m_donor": donor_row["reference_margin"],
        "mass_base": base_row["reference_mass"],
        "mass_donor": donor_row["reference_mass"],
        "noise_floor": max(base_row["margin_error"], donor_row["margin_error"]),
    }


def _token_share(name: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Effect:
    return ratio_of_sums(
        f"{name}.token_share",
        rows["tokens"],
        rows["full_tokens"],
        clusters=rows[statistics.cluster],
        statistics=statistics,
    )


def _above_wrong_chunk(name: str, arm: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """An arm's cosine beside that of the wrong chunk, which says how much of it any cache would have."""
    if arm == "wrong_chunk":
        return
    arms = arm, "wrong_chunk"
    yield from paired_difference(f"{name}.cosine_above_wrong_chunk", rows, "cosine", arms, statistics, unit="cosine")


def _rotation(condition: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """What rotating keys is good for at the offsets of these prompts (critique CO3)."""
    gains = {"cosine": ("cosine", "cosine"), "agreement": ("agrees", "fraction"), "kl": ("kl", "nats")}
    for gain, (column, unit) in gains.items():
        arms = ("no_rotation", "splice_none") if gain == "kl" else ("splice_none", "no_rotation")
        yield from paired_difference(f"{condition}.rotation.{gain}_gain", rows, column, arms, statistics, unit=unit)


def _coupling(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """What coupling costs a spliced chunk, each scenario's two layouts against each other."""
    some = rows[rows["arm"] == "splice_neutral"].assign(agrees=lambda part: part["agrees"].astype(float))
    if not some["scenario"].notna().all():
        return
    table = some.pivot_table(index=["scenario", statistics.cluster], columns="condition", values="agrees")
    if set(CONDITIONS) <= set(table.columns):
        both = table[list(CONDITIONS)].dropna()
        if len(both):
            loss = both[CONDITIONS[0]] - both[CONDITIONS[1]]
            labels = both.index.get_level_values(statistics.cluster).to_list()
            yield mean("coupling.agreement_loss", loss, clusters=labels, statistics=statistics)
