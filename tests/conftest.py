"""Settings of all tests: nothing is timed, so a busy machine fails nothing."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("untimed")
