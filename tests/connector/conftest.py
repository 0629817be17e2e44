"""Hypothesis without deadlines: how long an example takes says nothing on a machine that others use."""

import hypothesis

hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")
