"""All claims of an experiment judged on all its models, when they were measured and again from what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from kvprobe.errors import ConfigError
from kvprobe.models.catalogue import Standing, standing
from kvprobe.probes.base import Probe
from kvprobe.runs import provenance
from kvprobe.runs.claims import Claim, Verdict, adjust, judge, not_applicable
from kvprobe.runs.config import ExperimentConfig, load_config
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.registration import Registration, registration
from kvprobe.runs.results import ModelResult, RunResult, Status, effects_of_rows

NOTHING_KNOWN = Registration()


def judged(
    config: ExperimentConfig, probe: Probe, models: Sequence[ModelResult], first: Registration = NOTHING_KNOWN
) -> tuple[Verdict, ...]:
    """A verdict for each claim and each model it is about, claim by claim, p values adjusted.

    What was claimed when the first cell was measured and is not any more is judged too.

    Args:
        config: the experiment.
        probe: that measured.
        models: what was measured.
        first: what was claimed when the first cell was measured; a verdict on a claim that is another says so.

    Raises:
        ConfigError: a claim is about an effect that the probe does not measure.
    """
    verdicts = []
    for claim, model, beside in _asked(config.claims, models):
        verdict = _judged(claim, model, beside, probe)
        verdicts.append(_with_history(verdict, claim, model, probe, first))
    verdicts += _of_withdrawn(config, models, probe, first)
    return tuple(adjust(verdicts, config.statistics.false_discovery_rate))


def judged_again(result: RunResult) -> RunResult:
    """A finished run with effects read from its rows again, judged by the claims that its file makes today.

    Nothing is measured. A claim on what the run did not measure is not applicable. Where the file is gone, or cannot
    be read, the claims stay as they were.
    """
    config = result.config.model_copy(update={"claims": claims_of_today(result.config)})
    probe = make_probe(config)
    models = {name: _read_again(model, result) for name, model in result.models.items()}
    verdicts, first = [], registration(result.folder)
    for claim, model, beside in _asked(config.claims, list(models.values())):
        try:
            verdict = _judged(claim, model, beside, probe)
        except ConfigError:
            unmeasured = f"This run did not measure {claim.parsed.effect}; run the experiment again."
            verdict = not_applicable(claim, model.name, unmeasured, beside)
        verdicts.append(_with_history(verdict, claim, model, probe, first))
    verdicts += _of_withdrawn(config, list(models.values()), probe, first)
    return replace(
        result,
        config=config,
        hash=config.hash,
        models=models,
        verdicts=tuple(adjust(verdicts, config.statistics.false_discovery_rate)),
        provenance={**result.provenance, "judged": provenance.code_version()},
    )


def claims_of_today(config: ExperimentConfig) -> list[Claim]:
    """The claims that the experiment's file makes now; as they were where it is gone or cannot be read."""
    if not config.source:
        return config.claims
    try:
        return load_config(config.source, profile=config.profile, models=config.models).claims
    except ConfigError:
        return config.claims


def _of_withdrawn(
    config: ExperimentConfig, models: Sequence[ModelResult], probe: Probe, first: Registration
) -> Iterator[Verdict]:
    for claim, model, beside in _asked(first.withdrawn(config.claims), models):
        # Another probe, or other parameters, may have run under the experiment's name.
        with suppress(ConfigError):
            verdict = _judged(claim, model, beside, probe)
            told = f"withdrawn {first.when_withdrawn(claim)}, after the first cell was measured"
            yield replace(verdict, changed=told)


def _asked(claims: Sequence[Claim], models: Sequence[ModelResult]) -> Iterator[tuple[Claim, ModelResult, Standing]]:
    beside = {model.name: standing(model.name) for model in models}
    for claim in claims:
        for model in models:
            if claim.about(model.name, beside[model.name].paper_model):
                yield claim, model, beside[model.name]


def _judged(claim: Claim, model: ModelResult, beside: Standing, probe: Probe) -> Verdict:
    if model.margin_only and claim.parsed.effect not in {effect.name for effect in model.effects}:
        why = f"It is about decisions, and the model is measured on margins alone. {model.reason}"
        return not_applicable(claim, model.name, why, beside)
    if model.status is Status.MEASURED:
        verdict = judge(claim, model.name, model.effects, probe.read_by().may_lack, beside)
        return replace(verdict, margin_only=model.margin_only)
    return not_applicable(claim, model.name, model.reason, beside)


def _with_history(verdict: Verdict, claim: Claim, model: ModelResult, probe: Probe, first: Registration) -> Verdict:
    """The verdict with what the claim was when the first cell was measured, and how that comes out."""
    if not first.changed(claim):
        return verdict
    then, when = first.claims.get(claim.id), first.when(claim)
    if then is None:
        return replace(verdict, changed=f"made {when}, after the first cell was measured")
    try:
        word = _judged(then, model, Standing(verdict.tier, verdict.paper_model), probe).word
    except ConfigError:
        word = "not measured"
    said = then.statement + (" as a headline" if then.headline and not claim.headline else "")
    return replace(verdict, changed=f"changed {when}, after the first cell was measured: was {said} ({word})")


def _read_again(model: ModelResult, result: RunResult) -> ModelResult:
    if not model.effects:
        return model
    return replace(model, effects=effects_of_rows(model, result.config, result.folder))
