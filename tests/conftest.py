"""What all tests share: properties that run the same way everywhere."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "same-everywhere",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same-everywhere")
