"""What the rows of `timing` mean: the depth at which each instrument finds the conclusion at either place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvprobe.figures.bars import recovery_by
from kvprobe.figures.by_model import EffectsByModel
from kvprobe.figures.panel import Panel, PaperEntry
from kvprobe.figures.profiles import Profiles
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.kit.reading.decoding import PROMPTS, right_share
from kvprobe.probes.mechanism.timing.probe import PLACES, Timing
from kvprobe.stats import Effect, Sample, joined

# Accuracy, share of the gap, share of prompts.
_LEVELS = {"probe": 0.9, "patch": 0.5, "lens": 0.9, "tuned": 0.9}
_LENSES = ("lens", "tuned")
_NOTE = ("at the note (the rule's cases)", COLORS["blue"], "o")
_DECISION = ("at the decision token", COLORS["orange"], "^")


def effects(sample: Sample, _: Timing) -> Iterator[Effect]:
    """Onsets and peaks, leads of the probe and of the patch, commits of the lenses, and the lens's error."""
    for instrument, measured in sample.by("measurement"):
        for place, part in measured.by("place"):
            yield _peak(part, f"{instrument}_{place}.peak")
            # Before the decision no action is next, so a lens has nothing to be early with there.
            if place == "decision" or instrument not in _LENSES:
                yield _onset(part, f"{instrument}_{place}.onset", _LEVELS[instrument])
        if instrument in _LENSES:
            yield from _commit(measured.of(place="decision"), f"{instrument}_decision.commit")
        elif set(measured.rows["place"]) == set(PLACES):
            yield _lead(measured, f"{instrument}.lead", _LEVELS[instrument])
    if len(lens := sample.of(measurement="lens", place="decision")):
        top = lens.of(layer=lens.rows["layer"].max())
        errors = [(top.rows[side] - top.rows[f"m_{side}"]).abs() for side in ("base", "donor")]
        yield top.maximum("lens_decision.error", pd.concat(errors, axis=1).max(axis=1))


def names(_: Timing) -> Iterator[str]:
    """Those of `effects`."""
    measured = [f"{instrument}_{place}" for instrument in _LEVELS for place in PLACES]
    yield from joined(measured, "peak")
    yield from joined([name for name in measured if name not in ("lens_note", "tuned_note")], "onset")
    yield from joined([f"{lens}_decision" for lens in _LENSES], "commit")
    yield from ("probe.lead", "patch.lead", "lens_decision.error")


def _scores(sample: Sample) -> tuple[Sample, dict[str, list[str]]]:
    """One row for each pair, with the score after each number of blocks, and the columns of each place in order.

    The score of a patch is its shift, that of other instruments how many of the two prompts are read correctly; the
    column `whole` is what it is out of: the gap, in logits, or 2.

    Args:
        sample: rows of one instrument.
    """
    rows = sample.rows
    if (rows["measurement"] == "patch").all():
        scored = rows.assign(score=sample.shift, whole=sample.gap)
    else:
        scored = rows.assign(score=rows[list(PROMPTS)].astype(float).sum(axis=1), whole=float(len(PROMPTS)))
    scored["cell"] = rows["place"] + "_" + rows["layer"].astype(str)
    names = {
        str(place): [f"{place}_{layer}" for layer in sorted(part["layer"].unique())]
        for place, part in rows.groupby("place")
    }
    wide = scored.pivot(index="pair", columns="cell", values="score")
    pairs = scored.groupby("pair")[["whole", sample.statistics.cluster]].first()
    return sample.table(wide.join(pairs)), names


def _peak(sample: Sample, name: str) -> Effect:
    """The highest score over all layers, chosen in the same pairs: it says whether there is anything to time."""
    scores, names = _scores(sample)
    ((*layers,),) = names.values()
    return scores.ratio(name, str(scores.rows[layers].sum().idxmax()), "whole")


def _onset(sample: Sample, name: str, level: float) -> Effect:
    scores, names = _scores(sample)
    ((*layers,),) = names.values()
    return scores.bootstrap(name, lambda sums: _crossing(sums, level), "depth", sums_of=[*layers, "whole"])


def _lead(sample: Sample, name: str, level: float) -> Effect:
    """The onset at the decision minus that at the note."""
    scores, names = _scores(sample)
    columns, first = [*names["decision"], *names["note"], "whole"], len(names["decision"])

    def onsets(sums: NDArray[np.float64]) -> tuple[float, float]:
        return _crossing(np.append(sums[:first], sums[-1]), level), _crossing(sums[first:], level)

    def lead(sums: NDArray[np.float64]) -> float:
        decision, note = onsets(sums)
        return decision - note

    effect = scores.bootstrap(name, lead, "depth", sums_of=columns)
    if all(onset > 1 for onset in onsets(scores.rows[columns].to_numpy(float).sum(axis=0))):
        return replace(effect, low=-np.inf, high=np.inf, method="reached at neither place")
    return effect


def _crossing(sums: NDArray[np.float64], level: float) -> float:
    """From the sums `[layer]` of the scores, with what they are out of behind them."""
    return crossing(sums[:-1] / sums[-1], level)


def crossing(profile: NDArray[np.float64], level: float) -> float:
    """Depth at which `profile` `[layer]` first reaches `level`, interpolated; one block beyond the top if never."""
    top = len(profile) - 1
    reached = np.flatnonzero(profile >= level)
    if not len(reached):
        return (top + 1) / top
    after = int(reached[0])
    if not after:
        return 0.0
    before = profile[after - 1]
    return float(after - 1 + (level - before) / (profile[after] - before)) / top


def _commit(sample: Sample, name: str) -> Iterator[Effect]:
    """Mean over prompts of the depth from which on the lens is right; prompts that end wrong are excluded."""
    if not len(sample):
        return
    top, cluster = int(sample.rows["layer"].max()), sample.statistics.cluster
    found = []
    for _, part in sample.rows.sort_values("layer").groupby("pair"):
        for side in PROMPTS:
            wrong = np.flatnonzero(~part[side].to_numpy(dtype=bool))
            first = int(wrong[-1]) + 1 if len(wrong) else 0
            found.append({"depth": first / top, cluster: part[cluster].iloc[0]})
    prompts = sample.table(pd.DataFrame(found))
    if len(right := prompts.where(prompts.rows["depth"] <= 1, exclude=True)):
        yield right.mean(name, "depth", "depth")


def _by_layer(rows: pd.DataFrame) -> pd.Series:
    """Share of the gap for patches, share of prompts for the others."""
    if (rows["measurement"] == "patch").all():
        return recovery_by(rows, "layer")
    return right_share(rows).groupby(rows["layer"]).mean()


def _over_depth(ylabel: str, chance: float, looks: Mapping[tuple[str, str], tuple[str, str, str]]) -> Profiles:
    """Scores of instruments at places, each with its label, colour and marker; `chance` is the meaningless score."""

    def lines(panel: Panel) -> dict[str, tuple[pd.Series, str, str]]:
        parts = panel.rows.groupby(["measurement", "place"])
        return {
            label: (_by_layer(parts.get_group(measured)), color, marker)
            for measured, (label, color, marker) in looks.items()
        }

    def onsets(panel: Panel) -> Iterator[tuple[float, str]]:
        blocks = int(panel.rows["layer"].max())
        for (instrument, place), (_, color, _) in looks.items():
            onset = panel.effects[f"{instrument}_{place}.onset"].estimate
            if onset <= 1:
                yield onset * blocks, color

    return Profiles(lines, ylabel, 1.7, levels=(chance, 1.0), xlabel="blocks run", marks=onsets, mark="onset")


READING = Reading(
    effects,
    FigureSpec(
        "At which depth is the conclusion in the note, and at which in the decision token?",
        (
            _over_depth(
                "probe accuracy,\nother skeletons", 0.5, {("probe", "note"): _NOTE, ("probe", "decision"): _DECISION}
            ),
            _over_depth(
                "recovery by the\ndonor's residual", 0.0, {("patch", "note"): _NOTE, ("patch", "decision"): _DECISION}
            ),
            _over_depth(
                "prompts that the\nlens reads correctly",
                0.5,
                {
                    ("lens", "decision"): ("logit lens at the decision", COLORS["vermilion"], "s"),
                    ("tuned", "decision"): ("tuned lens at the decision", COLORS["purple"], "v"),
                },
            ),
        ),
        main=EffectsByModel(
            {
                "probe_note.onset": "probe,\nnote",
                "probe_decision.onset": "probe,\ndecision",
                "patch_note.onset": "patch,\nnote",
                "patch_decision.onset": "patch,\ndecision",
                "lens_decision.commit": "lens,\ncommit",
            },
            "Onset of the conclusion (above 1: never)",
            ylabel="onset (share of depth)",
            levels=(1.0,),
            ylim=(0, 1.25),
        ),
        key_columns=3,
    ),
    paper={
        "probe_note.onset": PaperEntry("timing", "write_lets_check", "relative_depth"),
        "lens_decision.commit": PaperEntry("timing", "decision_commit_logit_lens", "relative_depth"),
    },
    names=names,
)
