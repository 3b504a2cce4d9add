"""How long the properties are tried: seconds by default, an hour with --slow.

By default every test sees the same few examples in every run. With --slow they are new ones, and a
test is repeated until it has had its share of the hour. VARJAX_PROPERTY_SECONDS is another time
than an hour; VARJAX_PROPERTY_EXAMPLES, how many examples a repetition has with --slow.
"""

import os
import time

import pytest
from hypothesis import HealthCheck, settings

HOUR = 3600.0  # seconds of all property tests together, counted over all worker processes
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


def pytest_collection_modifyitems(config, items):
    """Give every property its share of the hour."""
    mine = [item for item in items if _is_property(item)]
    for item in mine:
        item.share = float(os.environ.get("VARJAX_PROPERTY_SECONDS", HOUR)) / len(mine)


def _is_property(item) -> bool:
    return hasattr(getattr(item, "obj", None), "hypothesis")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """With --slow, repeat a property until its share of the time is over."""
    start = time.monotonic()
    result = yield
    if pyfuncitem.config.getoption("--slow") and _is_property(pyfuncitem):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        while time.monotonic() - start < pyfuncitem.share:
            pyfuncitem.obj(**arguments)
    return result
