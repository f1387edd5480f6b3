"""What the rows of `auto` mean: what each policy errs and costs, and how well AUTO predicts what an edit needs."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.figures.cost_gain import CostGain, CostGainByModel
from kvprobe.figures.panel import PaperEntry
from kvprobe.figures.spec import FigureSpec
from kvprobe.figures.style import COLORS
from kvprobe.probes.base import Reading
from kvprobe.probes.editing.auto.probe import AutoProbe, auto_name
from kvprobe.probes.kit.reading.editing import BASELINE_RATES, baseline_effects
from kvprobe.stats import NOISE, Effect, Sample, joined

_LOSS = "full prefills"


def effects(sample: Sample, probe: AutoProbe) -> Iterator[Effect]:
    """Error rate, cost and loss of every policy; AUTO against always an erratum; its prediction; baselines."""
    first, costs = probe.error_costs[0], {auto_name(cost): cost for cost in probe.error_costs}
    for policy, part in sample.by("policy"):
        condition = "auto_{error_cost}" if policy in costs else policy
        yield from _policy_effects(part.named(error_cost=costs.get(policy)), condition, first)
    if len(auto := sample.of(policy=auto_name(first))):
        # Under the plain name that claims use.
        yield from _policy_effects(auto, "auto", first)
        yield from _prediction_effects(auto)
    yield from _against_erratum(sample, auto_name(first), first)
    yield from baseline_effects(sample.of(edit="asked"))
    yield sample.noise()


def names(probe: AutoProbe) -> Iterator[str]:
    """Those of `effects`."""
    policies = [*_COSTS.arms, *map(auto_name, probe.error_costs)]
    metrics = ("error_rate", "token_share", "loss")
    yield from joined(policies, (*metrics, *joined(("asked", "other"), "error_rate")))
    yield from joined("auto_less_erratum", (*metrics, "most_tokens"))
    yield from joined("auto.needs", ("accuracy", "precision", "recall"))
    # What an edit's field shares with the other one, as the scenarios say it.
    yield from joined("changes", ("asked", "other"), "*")
    yield from ("needed.rate", *BASELINE_RATES, NOISE)


def _policy_effects(sample: Sample, policy: str, cost: float) -> Iterator[Effect]:
    yield sample.rate(f"{policy}.error_rate", "error")
    for kind, part in sample.by("edit"):
        yield part.rate(f"{policy}.{kind}.error_rate", "error")
    yield sample.mean(f"{policy}.token_share", "token_share")
    yield sample.mean(f"{policy}.loss", cost * sample.rows["error"] + sample.rows["token_share"], _LOSS)


def _prediction_effects(auto: Sample) -> Iterator[Effect]:
    """How often an edit changes the full reprefill's decision at all, and how well AUTO foresees what is needed."""
    for kind, joint, part in auto.by("edit", "joint"):
        yield part.rate(f"changes.{kind}.{joint}", (part.rows["truth"] > 0) != (part.rows["m_base"] > 0))
    yield auto.rate("auto.needs.accuracy", auto.rows["predicted"] == auto.rows["needed"])
    for metric, given, asked in (("precision", "predicted", "needed"), ("recall", "needed", "predicted")):
        if len(part := auto.of(**{given: True})):
            yield part.rate(f"auto.needs.{metric}", asked)
    yield auto.rate("needed.rate", "needed")


def _against_erratum(sample: Sample, policy: str, cost: float) -> Iterator[Effect]:
    """AUTO less always an erratum, on the same edits."""
    both = sample.of(policy=(policy, "always_erratum"))
    edits = both.rows.set_index(["pair", "edit"])
    auto, always = (edits[edits["policy"] == name] for name in (policy, "always_erratum"))
    if auto.empty or always.empty:
        return
    always, paired = always.loc[auto.index], both.table(auto)
    tokens, errors = (auto[column] - always[column] * 1.0 for column in ("token_share", "error"))
    yield paired.mean("auto_less_erratum.token_share", tokens)
    yield paired.maximum("auto_less_erratum.most_tokens", tokens, "fraction")
    yield paired.mean("auto_less_erratum.error_rate", errors)
    yield paired.mean("auto_less_erratum.loss", cost * errors + tokens, _LOSS)


_COSTS = CostGain(
    {
        "always_stale": ("always stale", COLORS["grey"], "o"),
        "always_field_only": ("always field only", COLORS["sky"], "s"),
        "always_selective_4": ("always field + 4 tokens", COLORS["orange"], "v"),
        "always_erratum": ("always an erratum", COLORS["vermilion"], "^"),
        "field_and_erratum": ("always field + erratum", COLORS["purple"], "P"),
        "if_mentioned": ("erratum if named later", COLORS["green"], "X"),
        "cheapest_right": ("cheapest correct edit (bound)", COLORS["ink"], "*"),
        "auto": ("AUTO", COLORS["blue"], "D"),
    },
    "token_share",
    "error_rate",
    "tokens run (share of a prefill)",
    "decisions unlike a full reprefill",
    3.2,
    (-0.03, 1.0),
    front=False,
    line=("auto_{error_cost}", "AUTO at other costs of an error", COLORS["blue"]),
    levels=(),
    xlim=(-0.02, None),
)

READING = Reading(
    effects,
    FigureSpec(
        "Which edit suffices? Choosing before paying",
        (_COSTS,),
        main=CostGainByModel(
            _COSTS,
            "AUTO and always an erratum",
            "tokens run (share of a prefill)",
            "error rate",
            arms=("always_erratum", "auto"),
            key_place="upper right",
        ),
    ),
    paper={
        f"auto.needs.{metric}": PaperEntry("auto_diagnostic", "margin_0.2", metric)
        for metric in ("precision", "recall", "accuracy")
    },
    may_lack={
        "auto.needs.precision": "AUTO never chose more than an in-place edit.",
        "auto.needs.recall": "No edit needed more than an in-place one.",
    },
    names=names,
)
