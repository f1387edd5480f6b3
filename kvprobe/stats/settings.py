"""How an experiment turns rows into effects: the `statistics` block of its YAML."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class StatisticsConfig(BaseModel):
    """Settings of all intervals of an experiment.

    Args:
        confidence: coverage the intervals aim at.
        cluster: the row column whose values are independent of each other (critique G6).
        minimum_clusters: with fewer clusters that hold several rows each, the range of the cluster values is
            given in place of an interval.
        seed: of the bootstrap's generator, where one is used.
        resamples: of the bootstrap, where one is used.
        false_discovery_rate: of the Benjamini-Hochberg family that the claims of one experiment form.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)
    cluster: str = "skeleton"
    minimum_clusters: int = Field(default=8, ge=2)
    seed: int = Field(default=0, ge=0)
    resamples: int = Field(default=9999, ge=999, le=1_000_000)
    false_discovery_rate: float = Field(default=0.05, gt=0.0, lt=1.0)
