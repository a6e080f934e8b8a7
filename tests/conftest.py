"""What all tests share: properties that run the same way everywhere, and one thread for tiny tensors."""

import os

# Two compute threads on two busy cores wait for each other through whole scheduler quanta.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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
