"""For all tests."""

import signal

import pytest

from tests import side_by_side

# What workers of tests run when they start, not to be imported for its doctests.
collect_ignore = ["quick_torch"]

# Whatever starts in the background of a shell script ignores Ctrl-C, and so would all it starts:
# programs of ours that the tests interrupt among them.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    side_by_side.register(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked ``unsure`` gets a second try; the mark says why it needs one."""
    for item in items:
        mark = item.get_closest_marker("unsure")
        if mark is not None:
            if not mark.args or not all(isinstance(reason, str) for reason in mark.args):
                raise pytest.UsageError(f"{item.nodeid}: say the reason: unsure('…')")
            item.add_marker(pytest.mark.flaky(reruns=1))
