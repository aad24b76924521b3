"""Describe the Horovod wheel that fits this environment, and find it in the cache.

A wheel that was compiled for one version of torch does not work with another. So a cached wheel is
in a folder named after everything that it was compiled against (:class:`BuildInputs`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from hvd_elastic.install.cuda import find_nccl_header
from hvd_elastic.install.prerequisites import find_program

HOROVOD_VERSION = "0.28.1"

TORCH_REQUIREMENT = "torch>=2.2,<2.15"
"""Versions that the patched Horovod compiles with; the same as in the extra of setup.py."""

INSTALLED_BUILD_FILE = "HVD_ELASTIC_BUILD"
"""File in Horovod's .dist-info folder with the :attr:`BuildInputs.name` of the installed build."""


@dataclass(frozen=True)
class BuildInputs:
    """Everything that a Horovod wheel depends on; None for parts that it is built without.

    Attributes:
        horovod: version of the source release.
        python: implementation and version, such as ``cp311``.
        platform: machine and C library, such as ``x86_64-glibc2.36``.
        torch: full version with its local part (``2.13.0+cpu``).
        tensorflow: full version.
        mpi: version of Open MPI.
        cuda: CUDA version of torch; without it there are no operations on GPUs.
        nccl: version of NCCL's header.
        patch: first characters of the patch's SHA-256.
    """

    horovod: str
    python: str
    platform: str
    torch: str | None
    tensorflow: str | None
    mpi: str | None
    cuda: str | None
    nccl: str | None
    patch: str

    @property
    def name(self) -> str:
        """Name of the folder in the cache: readable, and different for any other inputs.

        >>> inputs = BuildInputs("0.28.1", "cp311", "x86_64-glibc2.36", "2.13.0+cpu",
        ...                      None, "4.1.4", None, None, "0123456789ab")
        >>> inputs.name
        'horovod-0.28.1-cp311-x86_64-glibc2.36-torch-2.13.0+cpu-mpi-4.1.4-patch-0123456789ab'
        """
        parts = [f"horovod-{self.horovod}", self.python, self.platform]
        for key in ("torch", "tensorflow", "mpi", "cuda", "nccl", "patch"):
            value = getattr(self, key)
            if value is not None:
                parts.append(f"{key}-{value}")
        return re.sub(r"[^A-Za-z0-9.+_-]", "_", "-".join(parts))

    def describe(self) -> str:
        """Return a line of text that says what is compiled in."""
        frameworks = [
            f"{key} {getattr(self, key)}"
            for key in ("torch", "tensorflow")
            if getattr(self, key) is not None
        ]
        transports = ["Gloo"]
        if self.mpi is not None:
            transports.append(f"Open MPI {self.mpi}")
        if self.nccl is not None:
            transports.append(f"NCCL {self.nccl}")
        return f"Horovod {self.horovod} for {', '.join(frameworks)} with {', '.join(transports)}"

    def to_dict(self) -> dict[str, str | None]:
        """Return the fields as a dictionary."""
        return asdict(self)


def detect_inputs(
    patch_sha256: str,
    *,
    with_tensorflow: bool = True,
    with_mpi: bool = True,
    with_nccl: bool = True,
) -> BuildInputs:
    """Return the inputs of a build in this environment; avoids importing heavy packages."""
    torch = _torch_facts()
    cuda = torch["cuda"] if with_nccl else None
    return BuildInputs(
        horovod=HOROVOD_VERSION,
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform=f"{platform.machine()}-{_libc()}",
        torch=torch["__version__"],
        tensorflow=_tensorflow_version() if with_tensorflow else None,
        mpi=_openmpi_version() if with_mpi else None,
        cuda=cuda,
        nccl=_nccl_version() if cuda is not None else None,
        patch=patch_sha256[:12],
    )


def wheel_cache() -> Path:
    """Return the user's folder of built wheels, with a subfolder for each set of inputs."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("hvd_elastic")) / "wheels"


def cached_wheel(inputs: BuildInputs) -> Path | None:
    """Return the cached wheel that was built from ``inputs``, or None."""
    return next(iter(sorted((wheel_cache() / inputs.name).glob("horovod-*.whl"))), None)


def installed_build() -> str | None:
    """Return the name of the build installed in this environment.

    Returns:
        The :attr:`BuildInputs.name` that it was built from; ``""`` if Horovod was installed in
        another way; None if there is no Horovod.
    """
    try:
        distribution = importlib.metadata.distribution("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (distribution.read_text(INSTALLED_BUILD_FILE) or "").strip()


def _libc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "") or "libc"
    except (ValueError, OSError):
        return "libc"


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _torch_facts() -> dict[str, str | None]:
    """Return versions from torch/version.py, since importing torch takes seconds."""
    folder = _package_folder("torch")
    found: dict[str, object] = {}
    if folder is not None and (folder / "version.py").is_file():
        found = runpy.run_path(str(folder / "version.py"))
    wanted = {name: found.get(name) for name in ("__version__", "cuda")}
    return {name: None if value is None else str(value) for name, value in wanted.items()}


def version_of(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _tensorflow_version() -> str | None:
    if _package_folder("tensorflow") is None:
        return None
    return version_of("tensorflow", "tensorflow-cpu", "tensorflow_cpu", "tf-nightly")


def _openmpi_version() -> str | None:
    """Return the version of Open MPI, if its compiler wrapper and headers are installed."""
    compiler = find_program("mpicxx", "mpic++")
    if compiler is None:
        return None
    found = re.search(r"Open MPI v?(\S+)", _output([compiler, "--showme:version"]))
    folders = _output([compiler, "--showme:incdirs"]).split()
    if found is None or not any((Path(folder) / "mpi.h").is_file() for folder in folders):
        return None
    return found.group(1)


def _nccl_version() -> str | None:
    header = find_nccl_header()
    if header is None:
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = [
        found.group(1)
        for part in ("MAJOR", "MINOR", "PATCH")
        if (found := re.search(rf"^#define\s+NCCL_{part}\s+(\d+)", text, re.MULTILINE))
    ]
    return ".".join(numbers) or None


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
