"""Settings shared by all tests."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

# The models of the tests are so small that further threads only wait for each other.
torch.set_num_threads(1)
settings.register_profile(
    "kvprobe",
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvprobe")
