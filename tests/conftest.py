from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Two busy cores make single examples slow at random, so no deadline; the seed is fixed so that a red run stays red.
settings.register_profile("quick", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("all", settings.get_profile("quick"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("SASH_TEST_PROFILE", "quick"))
