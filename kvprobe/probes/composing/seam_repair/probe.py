"""Header and seam (protocol 6.2 seam_repair, critique CO1): is what a repaired seam mends a missing attention sink?

The rule, and the notes behind it where they are one chunk with it, are compiled behind each header and put into the
prompt with their first b tokens run where they stand: every header with every b. One prompt of each pair is composed,
the base's and the donor's in turn.

    none      nothing: the chunk's first token becomes a sink of its own
    bos       the beginning of a text
    neutral   the beginning of a text, if there is one, and a line that says nothing
    real      what stands before the chunk here

Effects of each cell, such as `none.seam_1`, are those of `fidelity_effects` and `token_share`: tokens run to compose
over those of a prefill. Between cells:

    H.repair_B.kl_removed, .error_removed   share of the cell's divergence and margin error, at b = 0, that b = B mends
    header.H_over_none.kl, .margin_error    what the header alone mends, in nats and logits
    interaction.H.kl, .margin_error         how much more one token mends behind nothing than behind header H

and of the chunk's first token, averaged over layers, `R` being a header (at b = 0), `none_repaired` (b = 1) or
`full_prefill`:

    sink.R.key_norm, .value_norm   its keys' and values' norm over the median of the chunk
    sink.R.attention               attention that each later token puts on it, mean over heads
    sink.R.attention_elsewhere     the same of each of the chunk's other tokens
    sink.R.attention_on_start      the same of the prompt's first token: how much of a sink the model wants at all
    sink.R_over_full.attention     the first token's, less what it gets in the full prefill; so for all of these
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import pandas as pd
from pydantic import Field

from kvprobe.composing.base import Composed, make_scheme
from kvprobe.composing.chunk import Header, beginning_of_text
from kvprobe.composing.prompts import compile_segment, composition_of, merged
from kvprobe.composing.sinks import read_sink
from kvprobe.engine.forward import forward, prefill
from kvprobe.engine.readout import read
from kvprobe.errors import ConfigError
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.probes import legacy as base
from kvprobe.probes.base import PROBES, Measurement, Progress
from kvprobe.probes.gating import gate_columns
from kvprobe.probes.kit.fidelity import Judged, decide_behind, fidelity_effects, judged, paired_difference
from kvprobe.probes.kit.measures import pair_noise
from kvprobe.probes.legacy import Probe
from kvprobe.stats import Effect, StatisticsConfig, mean, ratio_of_sums
from kvprobe.tasks.context import Span, TokenizedContext
from kvprobe.tasks.pairs import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvprobe.engine.cache import KVCache
    from kvprobe.models.subject import Subject

HEADERS: tuple[Header, ...] = get_args(Header)
FULL = "full_prefill"
REPAIRED = "none_repaired"
_CHUNK = "chunk"
# What is read of the first token, in which unit.
_SINK_COLUMNS = {
    "key_norm": "ratio",
    "value_norm": "ratio",
    "attention": "fraction",
    "attention_elsewhere": "fraction",
    "attention_on_start": "fraction",
}
_PAPER_SEAMS = (0, 2, 4, 8, 16, 32)


@PROBES.register("seam_repair")
class SeamRepair(Probe):
    """Every header with every length of repaired seam, and the chunk's first token as an attention sink."""

    name: ClassVar[str] = "seam_repair"
    paper: ClassVar[Mapping[str, PaperEntry]] = {
        f"none.seam_{size}.cosine": PaperEntry("seam_repair", f"recompute_first_{size}", "logit_cosine")
        for size in _PAPER_SEAMS
    }
    may_lack: ClassVar[Mapping[str, str]] = {
        "*bos*": "The tokenizer has no token for the beginning of a text.",
        "*.kappa": "The reference gives one of the answers in fewer than a fifth of the prompts.",
    }

    class Parameters(base.Parameters):
        """Lengths of the seam and what is a chunk."""

        seams: tuple[Annotated[int, Field(ge=0)], ...] = Field(
            (0, 1, 2, 4, 8, 16), min_length=2, description="first tokens of the chunk that are run; with 0 and 1"
        )
        chunk: tuple[str, ...] = Field(("policy",), min_length=1, description="neighbouring segments, in order")

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        if not {0, 1} <= set(self.parameters.seams):
            raise ConfigError("The probe seam_repair compares with seams of 0 and 1 tokens; put both into 'seams'.")

    def measure(self, subject: Subject, pairs: Sequence[Pair], progress: Progress) -> list[Measurement]:
        """Per pair one row for each header and seam, and one for each reading of the first token.

        Raises:
            ConfigError: a pair has not the chunk's segments, one after the other.
        """
        rows: list[Measurement] = []
        for index, pair in enumerate(pairs):
            case = _Case(subject, pair, self.parameters.chunk, donor=bool(index % 2))
            made = (*case.cells(self.parameters.seams), *case.sinks())
            rows += [{"pair": index, **case.gate, "prompt": case.side, **row} for row in made]
            progress(index + 1, len(pairs))
        return rows

    def summarise(self, rows: pd.DataFrame, statistics: StatisticsConfig) -> list[Effect]:
        """Fidelity of every cell, what headers and seams mend, their interaction, the sink, the noise."""
        effects: list[Effect] = []
        cells = rows[rows["measurement"] == "cell"]
        for (header, seam), part in cells.groupby(["header", "seam"], sort=False):
            name = f"{header}.seam_{seam:.0f}"
            effects += fidelity_effects(name, part, statistics)
            effects.append(_ratio(f"{name}.token_share", part["tokens"], part["full_tokens"], part, statistics))
        for header, part in cells.groupby("header", sort=False):
            if header != "real":
                effects += _mended(str(header), part, statistics)
        effects += _between_headers(cells, statistics)
        effects += _sink_effects(rows[rows["measurement"] == "sink"], statistics)
        effects.append(pair_noise(rows, statistics))
        return effects

    def plot(self, panels: Sequence[Panel]) -> Figure:
        """Margin error and cosine over the length of the seam for each header, then the first token."""
        from kvprobe.probes.composing.seam_repair.figure import draw_seam_repair

        return draw_seam_repair(panels)

    def plot_main(self, axes: Axes, panels: Sequence[Panel]) -> None:
        """Margin error by header, without and with one repaired token, all models."""
        from kvprobe.probes.composing.seam_repair.figure import seam_repair_panel

        seam_repair_panel(axes, panels)


class _Case:
    """One prompt of a pair with its chunk, its reference and what the gate reads."""

    def __init__(self, subject: Subject, pair: Pair, segments: Sequence[str], *, donor: bool) -> None:
        self.subject, self.side = subject, "donor" if donor else "base"
        ours, other = (pair.donor, pair.base) if donor else (pair.base, pair.donor)
        self.prompt: TokenizedContext = merged(ours, _CHUNK, segments)
        answers = pair.base_answer_id, pair.donor_answer_id
        whole = prefill(subject, ours.token_ids)
        self.cache: KVCache = whole.cache
        self.judged: Judged = judged(subject, pair, donor=donor, logits=whole.logits)
        theirs = read(prefill(subject, other.token_ids).logits, *answers)
        again = forward(subject, ours.token_ids[-1:], whole.cache.take(slice(0, len(whole.cache) - 1)))
        floor = abs(read(again.logits, *answers).margin - self.judged.reading.margin)
        readings = (theirs, self.judged.reading) if donor else (self.judged.reading, theirs)
        self.gate = gate_columns(*readings, floor)
        self.chunks = {header: compile_segment(subject, self.prompt, _CHUNK, header) for header in self.headers()}

    def headers(self) -> list[Header]:
        """Those that the tokenizer allows."""
        known = bool(beginning_of_text(self.subject.tokenizer))
        return [header for header in HEADERS if known or header != "bos"]

    def compose(self, header: Header, seam: int) -> Composed:
        composition = composition_of(self.prompt, {_CHUNK: self.chunks[header]})
        return make_scheme("splice", seam=seam).compose(self.subject, composition)

    def cells(self, seams: Sequence[int]) -> Iterator[Measurement]:
        """Every header with every seam."""
        ids, at = self.prompt.token_ids, self.prompt.spans[_CHUNK]
        before = self.cache.take(slice(0, at.start)) if at.start else None
        for header, chunk in self.chunks.items():
            for seam in seams:
                scheme = make_scheme("splice", seam=seam)
                logits, run = decide_behind(self.subject, before, scheme, chunk, ids[at.end :])
                cost = {"tokens": at.start + run, "full_tokens": len(ids) - 1}
                where = {"measurement": "cell", "header": header, "seam": seam}
                yield {**where, **cost, **self.judged.compare(logits)}

    def sinks(self) -> Iterator[Measurement]:
        """The first token behind each header, repaired, and in the full prefill."""
        span: Span = self.prompt.spans[_CHUNK]
        caches = {str(header): self.compose(header, 0).cache for header in self.chunks}
        caches |= {REPAIRED: self.compose("none", 1).cache, FULL: self.cache}
        for name, cache in caches.items():
            reading = read_sink(self.subject, self.prompt.token_ids, cache, span)
            for layer in range(self.subject.layers):
                columns = {column: getattr(reading, column)[layer] for column in _SINK_COLUMNS}
                yield {"measurement": "sink", "cache": name, "layer": layer, **columns}


def _ratio(name: str, shift: pd.Series, gap: pd.Series, rows: pd.DataFrame, statistics: StatisticsConfig) -> Effect:
    return ratio_of_sums(name, shift, gap, clusters=rows[statistics.cluster], statistics=statistics)


def _mended(header: str, rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """The share of a header's divergence and margin error that seams of each length remove."""
    clusters = rows.groupby("pair")[[statistics.cluster]].first()
    for effect, column in (("kl_removed", "kl"), ("error_removed", "margin_error")):
        table = rows.pivot(index="pair", columns="seam", values=column).loc[clusters.index]
        # Where nothing is wrong to begin with there is no share of it to mend.
        if table[0].sum() > 0:
            for seam in (seam for seam in table.columns if seam):
                name = f"{header}.repair_{seam:.0f}.{effect}"
                yield _ratio(name, table[0] - table[seam], table[0], clusters, statistics)


def _between_headers(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """What a header alone mends, and how much more a repaired token mends where there is none."""
    units = {"kl": "nats", "margin_error": "logits"}
    first = rows[rows["seam"] == 0]
    clusters = first.groupby("pair")[statistics.cluster].first()
    for header in (header for header in HEADERS[1:] if header in set(rows["header"])):
        for column, unit in units.items():
            name, arms = f"header.{header}_over_none.{column}", ("none", header)
            yield from paired_difference(name, first, column, arms, statistics, by="header", unit=unit)
            table = rows.pivot(index="pair", columns=["header", "seam"], values=column)
            gains = [table[arm, 0] - table[arm, 1] for arm in arms]
            name = f"interaction.{header}.{column}"
            labels = clusters.loc[table.index]
            yield mean(name, gains[0] - gains[1], clusters=labels, statistics=statistics, unit=unit)


def _sink_effects(rows: pd.DataFrame, statistics: StatisticsConfig) -> Iterator[Effect]:
    """The first token's norms and attention, averaged over layers within each prompt."""
    keys = ["pair", "prompt", statistics.cluster, "cache"]
    prompts = rows.groupby(keys, sort=False)[list(_SINK_COLUMNS)].mean().reset_index()
    shared: dict[str, Any] = {"statistics": statistics}
    for cache, part in prompts.groupby("cache", sort=False):
        for column, unit in _SINK_COLUMNS.items():
            name = f"sink.{cache}.{column}"
            yield mean(name, part[column], clusters=part[statistics.cluster], unit=unit, **shared)
    for cache in prompts["cache"].unique():
        if cache != FULL:
            for column, unit in _SINK_COLUMNS.items():
                name, arms = f"sink.{cache}_over_full.{column}", (str(cache), FULL)
                yield from paired_difference(name, prompts, column, arms, statistics, by="cache", unit=unit)
