"""What holds for every test: property tests try the same examples on every machine, and none is slow because the machine
is busy.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
