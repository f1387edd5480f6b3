"""What the rows of `erratum_security` mean: false overrides, what defences prevent, and operators' edits followed."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.rates import Rates, RatesByModel, Series
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.erratum_security.probe import DEFENCES, METHODS, ErratumSecurity
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, baseline_effects
from kvprobe.stats import NOISE, Effect, Sample, joined
from kvprobe.tasks.erratum_lines import FORGERIES

_FORMS = {"claim": "claim", "quoted": "quoted erratum", "spoken": "spoken erratum", "own_line": "erratum, own line"}
_PLACES = {"in_turn": "in the request", "last_turn": "last turn"}
_EDITS = {
    "legitimate.erratum": "erratum",
    "legitimate.full_downstream": "KV-only edit",
    "contested.erratum": "erratum,\nold value forged",
    "contested.full_downstream": "KV-only edit,\nold value forged",
}
_DEFENCES = {
    "none": ("no defence", COLORS["vermilion"], "o"),
    "hidden": ("user's text hidden", COLORS["blue"], "s"),
    "operator_last": ("operator's line last", COLORS["green"], "^"),
}


def effects(sample: Sample, _: ErratumSecurity) -> Iterator[Effect]:
    """False overrides by defence, placement and form; what defences prevent and cost; operator's edits; baselines."""
    attacks = sample.of(part="attack", form=tuple(FORGERIES))
    for defence, place, form, part in attacks.by("defence", "placement", "form"):
        yield part.rate(f"{defence}.{place}.{form}.override_rate", part.rows["margin"] > 0)
    for defence, part in attacks.by("defence"):
        yield part.rate(f"{defence}.override_rate", part.rows["margin"] > 0)
    for defence in ("hidden", "operator_last"):
        overridden = attacks.rows["margin"] > 0
        yield from attacks.difference(f"{defence}.prevented", overridden, "defence", "none", defence, noise_floor=None)
    for defence, part in sample.of(part="attack", form="none").by("defence"):
        yield part.rate(f"clean.{defence}.correct_rate", part.rows["margin"] < 0)
        yield part.mean(f"{defence}.tokens", "extra_tokens", "tokens")
    operator = sample.of(part=("legitimate", "contested"))
    for kind, method, defence, part in operator.by("part", "method", "defence"):
        yield part.rate(f"{kind}.{method}.{defence}.new_rate", part.rows["margin"] > 0)
    for method, part in operator.of(part="legitimate", defence="none").by("method"):
        yield part.mean(f"edit.{method}.tokens", "edit_tokens", "tokens")
    yield from baseline_effects(sample)
    yield sample.noise()


def names(_: ErratumSecurity) -> Iterator[str]:
    """Those of `effects`."""
    yield from joined(DEFENCES, (*joined(_PLACES, FORGERIES, "override_rate"), "override_rate", "tokens"))
    yield from joined(DEFENCES[1:], "prevented")
    yield from joined("clean", DEFENCES, "correct_rate")
    yield from joined(("legitimate", "contested"), METHODS, DEFENCES, "new_rate")
    yield from joined("edit", METHODS, "tokens")
    yield from (*BASELINE_RATES, NOISE)


READING = Reading(
    effects,
    FigureSpec(
        "Can the user's text forge an erratum, and what stops it?",
        (
            Rates(
                {
                    f"{place}.{form}": f"{form_label},\n{place_label}"
                    for form, form_label in _FORMS.items()
                    for place, place_label in _PLACES.items()
                },
                tuple(Series(f"{name}.{{arm}}.override_rate", *look) for name, look in _DEFENCES.items()),
                "false overrides of the true field",
                4.6,
            ),
            Rates(
                _EDITS,
                tuple(Series(f"{{arm}}.{name}.new_rate", *_DEFENCES[name]) for name in ("none", "hidden")),
                "operator's edits that are followed",
                2.4,
            ),
        ),
        main=RatesByModel(
            {f"{name}.override_rate": label for name, (label, _, _) in _DEFENCES.items()},
            "Forged errata",
            "false overrides",
        ),
    ),
    step=6,
    names=names,
)
