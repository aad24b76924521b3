"""No file of tests leaves behind what would change the tests that follow it in its process."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import ROOT

__all__ = ["LeftBehind"]

# What libraries set when they are imported, and pytest sets for each test.
_NOT_OURS = (
    "PYTEST_",
    "KMP_",
    "TF2_",
    "TF_",
    "TPU_",
    "TORCH",
    "KERAS_BACKEND",
    "HDF5_",
    "ENABLE_RUNTIME_",
)


class LeftBehind:
    """Compares the process at the end of each file of tests with that at its beginning."""

    def __init__(self) -> None:
        self._before: dict[str, object] | None = None
        self._modules: dict[str, ModuleType] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        if self._before is None:
            self._before, self._modules = _state(), sys.modules.copy()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, None, None]:
        yield
        if nextitem is not None and nextitem.path == item.path:
            return
        before, now, self._before = self._before or {}, _state(), None
        if {"engines", "spark", "ray"} & {
            *item.path.parts
        }:  # which set what they like when imported
            return
        left = [
            f"{what} was {before.get(what)!r} and is {now.get(what)!r}"
            for what in sorted(before.keys() | now.keys())
            if before.get(what) != now.get(what)
        ]
        left += _changed_modules(self._modules)
        if left:
            pytest.fail(
                f"a test of {item.path.name} leaves behind, for the tests after it: "
                + "; ".join(left),
                pytrace=False,
            )


def _state() -> dict[str, object]:
    state: dict[str, object] = {
        f"os.environ[{name!r}]": value
        for name, value in os.environ.items()
        if not name.startswith(_NOT_OURS)
    }
    # Tests that start hosts keep a handler of SIGTERM for the session, and PyTorch one of SIGCHLD.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        state[number.name] = signal.getsignal(number)
    state["the working folder"] = Path.cwd()
    state["sys.path"] = sys.path.copy()
    # One of quick_torch removes itself, and libraries add theirs when they are imported.
    for finder in sys.meta_path:
        name = f"{type(finder).__module__}.{type(finder).__qualname__}"
        if name.startswith("tests.unit."):
            state[f"{name} in sys.meta_path"] = True
    return state


def _changed_modules(before: dict[str, ModuleType]) -> list[str]:
    """What is no mere import of a module: one that is gone, is another, or is a test's own file."""
    now = sys.modules.copy()
    # quick_torch replaces modules of PyTorch once they are needed.
    changed = [
        name
        for name, module in before.items()
        if now.get(name) is not module and not name.startswith("torch.")
    ]
    temporary = tempfile.gettempdir() + os.sep
    installed = (sys.prefix + os.sep, str(ROOT) + os.sep)  # a checkout may lie in that folder
    changed += [
        name
        for name, module in now.items()
        if name not in before
        and str(getattr(module, "__file__", "")).startswith(temporary)
        and not str(module.__file__).startswith(installed)
        and not name.startswith("__autograph_generated_file")  # TensorFlow's, of a traced function
    ]
    return [f"sys.modules[{name!r}]" for name in changed]
