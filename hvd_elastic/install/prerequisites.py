"""Check for the system software that the project needs, and name packages for apt and for pip.

Standard library only, since the set-up runs this before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hvd_elastic.errors import BuildError
from hvd_elastic.formatting import bytes_words
from hvd_elastic.programs.environment import libc

BUILD_SPACE_BYTES = 1_500_000_000
"""Disk space for a build of Horovod, with a margin."""
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin")
"""Where programs are looked for behind PATH, also by Horovod's build."""


class Purpose(Enum):
    """The purpose of a prerequisite."""

    ENVIRONMENT = "set up the Python environment"
    BUILD = "build Horovod"
    CLUSTER = "run virtual clusters (make demo, make test)"
    NETWORKS = "give virtual hosts networks of their own"
    MPI = "run jobs through Open MPI (--mpi)"
    BROWSER = "save charts as PNG files, test pages in a browser"
    ENGINES = "test runs on Kubernetes, Slurm and Spark (make test-engines)"


@dataclass(frozen=True)
class Prerequisite:
    """One piece of software that the machine needs.

    Attributes:
        find: returns its path, or None.
        apt: Debian/Ubuntu packages that provide it.
        optional: whether everything else works without it.
    """

    name: str
    find: Callable[[], str | None]
    apt: tuple[str, ...]
    purpose: Purpose
    optional: bool = False


def find_program(*names: str) -> str | None:
    """Return the first of ``names`` found on PATH or in the system's folders, or None.

    The PATH of a user who is not root often lacks /usr/sbin, where sshd, ip and tc are.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])
    for name in names:
        found = shutil.which(name, path=path)
        if found is not None:
            return found
    return None


def find_cmake() -> str | None:
    """Return the path of the CMake that Horovod's build will call, or None."""
    return os.environ.get("HOROVOD_CMAKE") or find_program("cmake")


def _find_python_headers() -> str | None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return str(header) if header.is_file() else None


def _find_venv() -> str | None:
    # Debian has the venv module without ensurepip, so that `python3 -m venv` fails half-way.
    spec = importlib.util.find_spec("ensurepip")
    return None if spec is None else spec.origin


def _python_package(suffix: str) -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}-{suffix}"


def openmpi_version() -> str | None:
    """Return the version of Open MPI, if its compiler wrapper and headers are installed."""
    compiler = find_program("mpicxx", "mpic++")
    if compiler is None:
        return None
    found = re.search(r"Open MPI v?(\S+)", _output([compiler, "--showme:version"]))
    folders = _output([compiler, "--showme:incdirs"]).split()
    if found is None or not any((Path(folder) / "mpi.h").is_file() for folder in folders):
        return None
    return found.group(1)


def _output(command: list[str]) -> str:
    """Return the output of a short command; empty if it cannot run."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _find_openmpi() -> str | None:
    return find_program("mpirun") if openmpi_version() else None


PREREQUISITES: tuple[Prerequisite, ...] = (
    Prerequisite("python venv", _find_venv, (_python_package("venv"),), Purpose.ENVIRONMENT),
    Prerequisite("python headers", _find_python_headers, (_python_package("dev"),), Purpose.BUILD),
    Prerequisite("g++", lambda: find_program("g++", "c++"), ("g++",), Purpose.BUILD),
    Prerequisite("make", lambda: find_program("make", "gmake"), ("make",), Purpose.BUILD),
    Prerequisite("cmake", find_cmake, ("cmake",), Purpose.BUILD),
    Prerequisite("git", lambda: find_program("git"), ("git",), Purpose.BUILD),
    Prerequisite("ssh", lambda: find_program("ssh"), ("openssh-client",), Purpose.CLUSTER),
    Prerequisite("sshd", lambda: find_program("sshd"), ("openssh-server",), Purpose.CLUSTER),
    Prerequisite("ip", lambda: find_program("ip"), ("iproute2",), Purpose.NETWORKS, optional=True),
    Prerequisite("tc", lambda: find_program("tc"), ("iproute2",), Purpose.NETWORKS, optional=True),
    Prerequisite(
        "Open MPI", _find_openmpi, ("libopenmpi-dev", "openmpi-bin"), Purpose.MPI, optional=True
    ),
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Programs that draw pages without a window."""


def machine_and_libc() -> str:
    """Return what compiled code fits, such as ``x86_64-glibc2.36``."""
    return f"{platform.machine()}-{libc().replace(' ', '') or 'libc'}"


def missing(wanted: Iterable[Prerequisite] = PREREQUISITES) -> list[Prerequisite]:
    """Return those of ``wanted`` that this machine lacks, in order."""
    return [item for item in wanted if item.find() is None]


def has_apt() -> bool:
    """Return whether this system installs packages with apt-get (Debian, Ubuntu)."""
    return find_program("apt-get") is not None


def apt_command(lacking: Iterable[Prerequisite], *, sudo: bool = True) -> str:
    """Return the command that installs the packages of ``lacking``, each once.

    >>> apt_command([item for item in PREREQUISITES if item.name in ("ip", "tc", "cmake")])
    'sudo apt-get install -y cmake iproute2'
    """
    packages = dict.fromkeys(package for item in lacking for package in item.apt)
    return f"{'sudo ' if sudo else ''}apt-get install -y {' '.join(packages)}"


RUN_REQUIREMENTS = ("packaging", "cffi", "pycparser", "cloudpickle", "psutil", "pyyaml")
"""Packages that Horovod imports, also during the build."""
BUILD_REQUIREMENTS = ("setuptools", "wheel")
"""Further packages for the build, which runs without pip's isolation and so finds frameworks."""

_PINNED = Path(__file__).with_name("pinned.txt")
_REQUIREMENT = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>[\d.]+).*(?:\\\n +--hash=\S+ *)+$", re.MULTILINE
)


def pinned_version(name: str) -> str:
    """Return the version at which a package is pinned."""
    return next(found["version"] for found in _requirements() if found["name"] == name)


def pip_arguments(names: Iterable[str], folder: Path) -> list[str]:
    """Return pip's arguments for exactly these packages, without what they depend on.

    Args:
        names: names of pinned packages.
        folder: where the file of requirements is written that the arguments name.
    """
    wanted = set(names)
    file = folder / "requirements.txt"
    lines = [found[0] for found in _requirements() if found["name"] in wanted]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["--no-deps", "--require-hashes", "--requirement", str(file)]


def _requirements() -> list[re.Match[str]]:
    return list(_REQUIREMENT.finditer(_PINNED.read_text(encoding="utf-8")))


def build_folder() -> Path:
    """Return the folder for temporary files, in which Horovod is built.

    Raises:
        BuildError: that of TMPDIR cannot be written. Python would take another one, and the
            compilers would not.
    """
    folder = Path(os.environ.get("TMPDIR") or tempfile.gettempdir()).absolute()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BuildError(f"{folder} cannot be written; name another folder in TMPDIR")
    return folder


def check_build_space(folder: Path) -> None:
    """Raise BuildError if Horovod cannot be built in a folder for lack of disk space."""
    free = shutil.disk_usage(folder).free
    if free < BUILD_SPACE_BYTES:
        raise BuildError(
            f"{folder} has {bytes_words(free)} free, the build needs "
            f"{bytes_words(BUILD_SPACE_BYTES)}; free some, or name another folder in TMPDIR"
        )
