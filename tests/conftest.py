"""Settings shared by all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The models of the tests are so small that further threads only wait for each other. Set before torch is imported,
# and in the environment, so that worker processes do the same and compute the same bytes.
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile(
    "kvprobe",
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvprobe")
