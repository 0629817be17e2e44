"""What holds for every test: property tests try the same examples everywhere, and a busy machine fails none of them."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# A shell that runs the tests in the background has them ignore SIGINT, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
