"""For all tests."""

import contextlib
import os
import signal
import sys
from importlib import import_module

import pytest
from hypothesis import settings

from tests import side_by_side
from tests.left_behind import LeftBehind
from tests.paths import ALL
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


def pytest_configure(config: pytest.Config) -> None:
    side_by_side.register(config)
    config.pluginmanager.register(LeftBehind())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked ``unsure`` gets a second try; the mark says why it needs one."""
    for item in items:
        mark = item.get_closest_marker("unsure")
        if mark is not None:
            if not mark.args or not all(isinstance(reason, str) for reason in mark.args):
                raise pytest.UsageError(f"{item.nodeid}: say the reason: unsure('…')")
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the tests that a run of all tests leaves out."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        terminalreporter.write_line(
            "left out: tests/engines (runs on Slurm, Spark and Ray); make test-engines runs them"
        )
