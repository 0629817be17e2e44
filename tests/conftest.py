"""What holds for every test: property tests have no deadline, because the machines that run them are noisy."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
