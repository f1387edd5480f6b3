"""All claims of an experiment judged on all its models, when they were measured and again from what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvprobe.errors import ConfigError
from kvprobe.models.catalogue import Standing, standing
from kvprobe.probes.base import Probe
from kvprobe.runs import provenance
from kvprobe.runs.claims import Claim, Verdict, adjust, judge, not_applicable
from kvprobe.runs.config import ExperimentConfig, load_config
from kvprobe.runs.preparation import make_probe
from kvprobe.runs.results import ModelResult, RunResult, Status, effects_of_rows


def judged(config: ExperimentConfig, probe: Probe, models: Sequence[ModelResult]) -> tuple[Verdict, ...]:
    """A verdict for each claim and each model it is about, claim by claim, p values adjusted.

    Raises:
        ConfigError: a claim is about an effect that the probe does not measure.
    """
    verdicts = [_judged(claim, model, beside, probe) for claim, model, beside in _asked(config, models)]
    return tuple(adjust(verdicts, config.statistics.false_discovery_rate))


def judged_again(result: RunResult) -> RunResult:
    """A finished run with effects read from its rows again, judged by the claims that its file makes today.

    Nothing is measured. A claim on what the run did not measure is not applicable. Where the file is gone, or cannot
    be read, the claims stay as they were.
    """
    config = result.config.model_copy(update={"claims": claims_of_today(result.config)})
    probe = make_probe(config)
    models = {name: _read_again(model, result) for name, model in result.models.items()}
    verdicts = []
    for claim, model, beside in _asked(config, list(models.values())):
        try:
            verdicts.append(_judged(claim, model, beside, probe))
        except ConfigError:
            unmeasured = f"This run did not measure {claim.parsed.effect}; run the experiment again."
            verdicts.append(not_applicable(claim, model.name, unmeasured, beside))
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


def _asked(config: ExperimentConfig, models: Sequence[ModelResult]) -> Iterator[tuple[Claim, ModelResult, Standing]]:
    beside = {model.name: standing(model.name) for model in models}
    for claim in config.claims:
        for model in models:
            if claim.about(model.name, beside[model.name].paper_model):
                yield claim, model, beside[model.name]


def _judged(claim: Claim, model: ModelResult, beside: Standing, probe: Probe) -> Verdict:
    if model.status is Status.MEASURED:
        return judge(claim, model.name, model.effects, probe.read_by().may_lack, beside)
    return not_applicable(claim, model.name, model.reason, beside)


def _read_again(model: ModelResult, result: RunResult) -> ModelResult:
    if not model.effects:
        return model
    return replace(model, effects=effects_of_rows(model, result.config, result.folder))
