"""Effects and their intervals: the only way a number leaves a probe."""

from kvprobe.stats.comparisons import (
    TestResult,
    adjust_benjamini_hochberg,
    adjust_holm,
    equivalent,
    mcnemar_exact,
)
from kvprobe.stats.effects import Effect
from kvprobe.stats.intervals import (
    maximum,
    mean,
    mean_of_ratios,
    median,
    proportion,
    ratio_of_sums,
)
from kvprobe.stats.labels import Label
from kvprobe.stats.resampling import bootstrapped
from kvprobe.stats.rows import RowFilter
from kvprobe.stats.sample import Sample
from kvprobe.stats.settings import StatisticsConfig

__all__ = [
    "Effect",
    "Label",
    "RowFilter",
    "Sample",
    "StatisticsConfig",
    "TestResult",
    "adjust_benjamini_hochberg",
    "adjust_holm",
    "bootstrapped",
    "equivalent",
    "maximum",
    "mcnemar_exact",
    "mean",
    "mean_of_ratios",
    "median",
    "proportion",
    "ratio_of_sums",
]
