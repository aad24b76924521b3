"""For all tests."""

import signal

import pytest

from tests import side_by_side

# Whatever starts in the background of a shell script ignores Ctrl-C, and so would all it starts:
# programs of ours that the tests interrupt among them.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    side_by_side.register(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes get a second try, three of them in all.

    Who needs it is listed as RERUN at the end, with how it failed the first time: a defect to find.
    """
    for item in items:
        if item.get_closest_marker("dist") or item.get_closest_marker("ssh"):
            item.add_marker(pytest.mark.flaky(reruns=1))
