"""Python environments for peers that need other packages, in the user's cache folder."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import platformdirs

from hvd_elastic.errors import RunError

_INSTALL_LIMIT_S = 600
_OURS = Path(__file__).resolve().parents[2]
"""Folder that contains ``hvd_elastic``."""


class PeerMissingError(RunError):
    """A peer cannot be measured on this machine; the message gives the reason."""


class PeerEnvironment:
    """Virtual environment with further packages on top of those of this Python.

    It sees the packages of this Python through a ``.pth`` file, so PyTorch is the same for all, and
    is not downloaded again.

    Args:
        name: name of the environment.
        requirements: requirements for pip.
        module: module that must be importable afterwards.
    """

    def __init__(self, name: str, requirements: Sequence[str], module: str) -> None:
        self.name = name
        self._requirements = tuple(requirements)
        self._module = module

    @property
    def folder(self) -> Path:
        """Folder of the environment; one for each version of Python."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return Path(platformdirs.user_cache_dir("hvd_elastic")) / "peers" / f"{self.name}-{version}"

    @property
    def python(self) -> Path:
        """Path of its Python interpreter."""
        return self.folder / "bin/python"

    def make(self) -> Path:
        """Create the environment unless it exists; return its folder.

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
        pip = (sys.executable, "-m", "pip", "--python", str(self.python))
        self._run([*pip, "install", "--quiet", "--no-input", *self._requirements])
        if not self._importable():
            raise PeerMissingError(f"{self._module} was installed and cannot be imported")
        return self.folder

    def version(self, package: str) -> str:
        """Return the version of a package in the environment."""
        found = importlib.metadata.distributions(name=package, path=[str(self._packages)])
        return next((each.version for each in found), "not installed")

    @property
    def _packages(self) -> Path:
        return self.folder / "lib" / self.folder.name.rpartition("-")[2] / "site-packages"

    def _link(self) -> None:
        """Make hvd_elastic and the packages of this Python importable in the environment.

        Done anew each time, since another checkout may have created it. Unlike with
        ``PYTHONPATH``, the environment's own packages come first.
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


# Both ask for torchvision, whose builds do not load beside PyTorch for CPUs, and do without.
LITDATA = PeerEnvironment(
    "litdata-alone",
    (
        *("--no-deps", "litdata", "boto3", "botocore", "jmespath", "lightning-utilities"),
        *("obstore", "python-dateutil", "s3transfer", "tifffile"),
    ),
    "litdata",
)
STREAMING = PeerEnvironment(
    "mosaicml-streaming-alone",
    (
        *("--no-deps", "mosaicml-streaming", "Brotli", "catalogue", "cramjam"),
        *("huggingface-hub<1", "python-snappy", "regex", "safetensors", "tokenizers<0.23"),
        *("tqdm", "transformers<5", "xxhash", "zstd<2"),
    ),
    "transformers, snappy, zstd",
)


def import_streaming() -> ModuleType:
    """Import mosaicml-streaming without its sets of pictures, which need torchvision."""
    sys.modules["streaming.vision"] = ModuleType("streaming.vision")
    import streaming

    return streaming
