"""All claims of an experiment judged on all its models."""

from __future__ import annotations

from collections.abc import Sequence

from kvprobe.models.catalogue import standing
from kvprobe.probes.base import Probe
from kvprobe.runs.claims import Verdict, adjust, judge, not_applicable
from kvprobe.runs.config import ExperimentConfig
from kvprobe.runs.results import ModelResult, Status


def judged(config: ExperimentConfig, probe: Probe, models: Sequence[ModelResult]) -> tuple[Verdict, ...]:
    """A verdict for each claim and each model it is about, claim by claim, p values adjusted.

    Raises:
        ConfigError: a claim is about an effect that the probe does not measure.
    """
    verdicts, may_lack = [], probe.read_by().may_lack
    beside = {model.name: standing(model.name) for model in models}
    for claim in config.claims:
        for model in models:
            own = beside[model.name]
            if not claim.about(model.name, own.paper_model):
                continue
            if model.status is Status.MEASURED:
                verdicts.append(judge(claim, model.name, model.effects, may_lack, own))
            else:
                verdicts.append(not_applicable(claim, model.name, model.reason, own))
    return tuple(adjust(verdicts, config.statistics.false_discovery_rate))
