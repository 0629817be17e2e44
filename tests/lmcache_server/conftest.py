"""Hypothesis without a time limit per example: the machine may be busy, and each test is bounded by its examples."""

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")
