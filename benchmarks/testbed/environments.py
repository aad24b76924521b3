"""Environments of peers that need other packages, made on demand in the user's cache folder."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from hvd_elastic.errors import RunError

_INSTALL_LIMIT_S = 600
_OURS = Path(__file__).resolve().parents[2]
"""Where ``hvd_elastic`` lies."""


class PeerMissingError(RunError):
    """A peer cannot be measured on this machine; says why."""


class PeerEnvironment:
    """Packages on top of those of this Python, without touching them.

    The environment sees the packages of the running one through a ``.pth`` file, so PyTorch is the
    same for all, and is not downloaded again.

    Args:
        name: of the environment.
        requirements: what pip is asked for.
        module: what must be importable afterwards.
    """

    def __init__(self, name: str, requirements: Sequence[str], module: str) -> None:
        self.name = name
        self._requirements = tuple(requirements)
        self._module = module

    @property
    def folder(self) -> Path:
        """Where it lies; another one for each version of Python."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return Path(platformdirs.user_cache_dir("hvd_elastic")) / "peers" / f"{self.name}-{version}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin/python"

    def make(self) -> Path:
        """Make it unless it is there; returns its folder.

        Raises:
            PeerMissingError: pip cannot install the packages, or they cannot be imported.
        """
        if importlib.util.find_spec("torch") is None:
            raise PeerMissingError("PyTorch is not installed; use: make env")
        self._link()
        if self._importable():
            return self.folder
        shutil.rmtree(self.folder, ignore_errors=True)
        self._run([sys.executable, "-m", "venv", "--without-pip", str(self.folder)])
        self._link()
        self._run(
            [
                *(sys.executable, "-m", "pip", "--python", str(self.python), "install"),
                *("--quiet", "--no-input", *self._requirements),
            ]
        )
        if not self._importable():
            raise PeerMissingError(f"{self._module} was installed and cannot be imported")
        return self.folder

    def version(self, package: str) -> str:
        """Version of a package in it."""
        found = importlib.metadata.distributions(name=package, path=[str(self._packages)])
        return next((each.version for each in found), "not installed")

    @property
    def _packages(self) -> Path:
        return self.folder / "lib" / self.folder.name.rpartition("-")[2] / "site-packages"

    def _link(self) -> None:
        """Show it this package and those of the running Python, another checkout's perhaps by now.

        They come after its own, unlike what ``PYTHONPATH`` names.
        """
        if self._packages.is_dir():
            shown = f"{sysconfig.get_path('purelib')}\n{_OURS}\n"
            (self._packages / "base.pth").write_text(shown, encoding="utf-8")

    def _importable(self) -> bool:
        if not self.python.exists():
            return False
        command = [str(self.python), "-c", f"import {self._module}"]
        return subprocess.run(command, capture_output=True).returncode == 0

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise PeerMissingError(
                f"{' '.join(command)} took more than {_INSTALL_LIMIT_S} s"
            ) from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line.upper()]
            why = lines[-1] if lines else done.stderr.strip()[-200:]
            raise PeerMissingError(f"{', '.join(self._requirements)} cannot be installed: {why}")
