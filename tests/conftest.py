"""For all tests."""

import contextlib
import gc
import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests import side_by_side
from tests.left_behind import LeftBehind
from tests.paths import ALL, OF_ONE_FRAMEWORK, ROOT
from tests.quick_torch import sitecustomize as sitecustomize

# What workers of tests run when they start, not to be imported for its doctests.
collect_ignore = ["quick_torch"]

# Hundreds of processes of ours are started: each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Two threads for tensors of ten numbers wait for each other, where other processes use the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", settings.get_profile("ci"), max_examples=100 if ALL else 30)

# Each process collects the tests of both frameworks. Triton, which comes with a PyTorch for GPUs,
# dies of signal 11 where TensorFlow was loaded before it.
with contextlib.suppress(ImportError):
    import_module("triton")

# Whatever starts in the background of a shell script ignores Ctrl-C, and so would all it starts:
# programs of ours that the tests interrupt among them.
signal.signal(signal.SIGINT, signal.default_int_handler)


class FrameworksThatAreThere:
    """Leaves out the doctests of modules that import a framework which is not installed."""

    def __init__(self) -> None:
        absent = [name for name in OF_ONE_FRAMEWORK if find_spec(name) is None]
        self._left_out = {ROOT / path for name in absent for path in OF_ONE_FRAMEWORK[name]}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if collection_path in self._left_out else None


def pytest_configure(config: pytest.Config) -> None:
    side_by_side.register(config)
    config.pluginmanager.register(LeftBehind())
    config.pluginmanager.register(FrameworksThatAreThere())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked ``unsure`` gets a second try; the mark says why it needs one.

    A file that takes a minute runs first, or the other processes would wait for it at the end.
    """
    items.sort(key=lambda item: item.path.name != "test_browser.py")
    for item in items:
        mark = item.get_closest_marker("unsure")
        if mark is not None:
            if not mark.args or not all(isinstance(reason, str) for reason in mark.args):
                raise pytest.UsageError(f"{item.nodeid}: say the reason: unsure('…')")
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """What is there before the first test is never garbage, and the collector takes long for it."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the tests that a run of all tests leaves out."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        terminalreporter.write_line(
            "left out: tests/engines (runs on Slurm, Spark and Ray), tests/trainers (Lightning); "
            "make test-engines and make test-trainers run them"
        )
