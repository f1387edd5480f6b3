"""Settings shared by all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvprobe",
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvprobe")
