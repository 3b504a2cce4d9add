"""How many examples the properties are tried with: the same few in every run by default; with
--slow new ones, 500 or VARJAX_PROPERTY_EXAMPLES of them."""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = 25

COMMON = dict(
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,  # folders of a test are emptied by the test itself
    ],
)
settings.register_profile("default", derandomize=True, max_examples=EXAMPLES, **COMMON)
settings.register_profile(
    "slow", max_examples=int(os.environ.get("VARJAX_PROPERTY_EXAMPLES", 500)), **COMMON
)


def pytest_configure(config):
    settings.load_profile("slow" if config.getoption("--slow") else "default")
