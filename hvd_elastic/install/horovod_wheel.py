"""Describe the Horovod wheel that fits this environment, find it in the cache, and find CUDA.

A wheel that was compiled for one version of a framework does not work with another. So a cached
wheel is in a folder named after everything that it was compiled against (:class:`BuildInputs`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvd_elastic.errors import BuildError
from hvd_elastic.frameworks import TITLES, tensorflow_version, version_of, why_no_tensorflow
from hvd_elastic.hosts.remote_python import FROM_NO_WORKING_FOLDER
from hvd_elastic.install.prerequisites import (
    find_program,
    machine_and_libc,
    openmpi_version,
    pinned_version,
)
from hvd_elastic.programs.nvidia import ask_nvidia_smi

_COMPILER_PACKAGES = (
    *("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"),
    *("nvidia-cuda-runtime", "nvidia-cuda-cccl"),
)
PIP_CUDA = ".".join(pinned_version(_COMPILER_PACKAGES[0]).split(".")[:2])
"""Version of CUDA whose compiler pip can install."""
_USUAL_HOME = Path("/usr/local/cuda")


def find_cuda_home() -> Path | None:
    """Return the folder of the CUDA toolkit (with ``bin/nvcc``), which torch would find too."""
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        named = os.environ.get(variable)
        if named and (Path(named) / "bin" / "nvcc").is_file():
            return Path(named)
    nvcc = find_program("nvcc")
    if nvcc is not None:
        return Path(nvcc).resolve().parent.parent
    return _USUAL_HOME if (_USUAL_HOME / "bin" / "nvcc").is_file() else None


def toolkit_packages(cuda: str) -> list[str]:
    """Return the pinned packages that compile for this CUDA; empty if there are none.

    >>> toolkit_packages("13.0")[0], toolkit_packages("12.8")
    ('nvidia-cuda-nvcc', [])
    """
    return list(_COMPILER_PACKAGES) if cuda == PIP_CUDA else []


def assemble_toolkit(installed: Path, cuda: str) -> Path:
    """Make a CUDA toolkit folder out of the packages that pip has installed.

    The packages have ``lib`` where compilers look for ``lib64``, and no ``libcudart.so`` without a
    version number. The headers of the mathematical libraries, which PyTorch's headers include, are
    in other packages beside PyTorch.

    Args:
        installed: folder in which the packages were installed (``pip install --target``).

    Returns:
        The folder for ``CUDA_HOME``.
    """
    name = f"cu{_major(cuda)}"
    home = installed / "nvidia" / name
    beside = _nvidia_folder(name)
    if beside is not None:
        for folder in ("include", "lib"):
            for source in (beside / folder).glob("*"):
                link = home / folder / source.name
                if not link.exists():
                    link.symlink_to(source)
    runtime = next(iter(sorted((home / "lib").glob("libcudart.so.*"))), None)
    plain = home / "lib" / "libcudart.so"
    if runtime is not None and not plain.exists():
        plain.symlink_to(runtime.name)
    if not (home / "lib64").exists():
        (home / "lib64").symlink_to("lib")
    return home


def find_nccl_header() -> Path | None:
    """Return ``nccl.h``: named by variables of Horovod's build, PyTorch's own, or the machine's."""
    folders: list[Path] = []
    if include := os.environ.get("HOROVOD_NCCL_INCLUDE"):
        folders.append(Path(include))
    if home := os.environ.get("HOROVOD_NCCL_HOME"):
        folders.append(Path(home) / "include")
    # Only one NCCL can be loaded in a process, which is PyTorch's.
    if package := _nvidia_folder("nccl"):
        folders.append(package / "include")
    if cuda := find_cuda_home():
        folders.append(cuda / "include")
    folders += [Path("/usr/include"), Path("/usr/local/include")]
    return next((folder / "nccl.h" for folder in folders if (folder / "nccl.h").is_file()), None)


def find_nccl_library(header: Path) -> Path | None:
    """Return PyTorch's own NCCL library if the header belongs to it; None lets Horovod search."""
    package = _nvidia_folder("nccl")
    if package is None or header.parent != package / "include":
        return None
    return next(iter(sorted((package / "lib").glob("libnccl.so.*"))), None)


def _major(version: str) -> str:
    return version.split(".", maxsplit=1)[0]


def _nvidia_folder(name: str) -> Path | None:
    """Return the folder of one of NVIDIA's packages, which have no module to find them by."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / name).is_dir():
            return Path(place) / name
    return None


HOROVOD_VERSION = "0.28.1"
RECORD = "build.json"
"""File beside a kept wheel: its inputs and its SHA-256."""

_ASK_HOROVOD = f"""{FROM_NO_WORKING_FOLDER}
import importlib, json
hvd = importlib.import_module("horovod." + sys.argv[1])
print(json.dumps({{
    "gloo": bool(hvd.gloo_built()), "mpi": bool(hvd.mpi_built()), "nccl": bool(hvd.nccl_built()),
}}))
"""

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
    def frameworks(self) -> list[str]:
        """Names of the frameworks that it is built for, the module of each."""
        return [name for name in TITLES if getattr(self, name) is not None]

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
        frameworks = [f"{name} {getattr(self, name)}" for name in self.frameworks]
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
    with_nccl: bool | None = None,
) -> BuildInputs:
    """Return the inputs of a build in this environment; avoids importing heavy packages.

    A TensorFlow that :func:`why_left_out` tells of is left out.

    Args:
        with_tensorflow: whether to build for TensorFlow, if there is one.
        with_mpi: whether to build with Open MPI, if there is one.
        with_nccl: whether to build with NCCL, if PyTorch is for CUDA. None: if this machine has a
            GPU, or has such a build installed, as hosts with GPUs have that share the folder. If
            nvidia-smi does not say, the build that is installed is kept.

    Raises:
        BuildError: nvidia-smi does not say whether there is a GPU, and neither is installed.
    """
    choose = partial(
        detect_inputs, patch_sha256, with_tensorflow=with_tensorflow, with_mpi=with_mpi
    )
    torch = _torch_facts()
    cuda = torch["cuda"] if with_nccl is not False else None
    if cuda is not None and with_nccl is None:
        try:
            is_for_gpus = has_gpu()
        except BuildError:
            for kept in (choose(with_nccl=True), choose(with_nccl=False)):
                if installed_build() == kept.name:
                    return kept
            raise
        if not is_for_gpus:
            with_cuda = choose(with_nccl=True)
            if installed_build() == with_cuda.name:
                return with_cuda
            cuda = None
    return BuildInputs(
        horovod=HOROVOD_VERSION,
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform=machine_and_libc(),
        torch=torch["__version__"],
        tensorflow=tensorflow_version() if with_tensorflow and not why_left_out(cuda) else None,
        mpi=openmpi_version() if with_mpi else None,
        cuda=cuda,
        nccl=_nccl_version() if cuda is not None else None,
        patch=patch_sha256[:12],
    )


def wheel_cache() -> Path:
    """Return the user's folder of built wheels, with a subfolder for each set of inputs."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("hvd_elastic")) / "wheels"


def cached_wheel(inputs: BuildInputs) -> Path | None:
    """Return a cached wheel that was built from ``inputs``, or also for another framework."""
    for wheel in sorted(wheel_cache().glob("*/horovod-*.whl")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads(wheel.with_name(RECORD).read_text(encoding="utf-8"))
            lacks: dict[str, Any] = {name: None for name in TITLES if name not in inputs.frameworks}
            if replace(BuildInputs(**record["inputs"]), **lacks) == inputs:
                return wheel
    return None


def check_kept(wheel: Path) -> None:
    """Check that a cached wheel is the file that was kept there.

    Raises:
        BuildError: others could have changed it, or it is damaged.
    """
    for path in (wheel, wheel.parent, wheel.parent.parent):
        found = path.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise BuildError(f"{path} belongs to user id {found.st_uid}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BuildError(f"others can write {path}")
    record = json.loads(wheel.with_name(RECORD).read_text(encoding="utf-8"))
    if record.get("sha256") != sha256_of(wheel):
        raise BuildError(f"{wheel.name} has another SHA-256 than when it was kept")


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def has_gpu() -> bool:
    """Return whether this machine has a GPU on which CUDA runs.

    Raises:
        BuildError: nvidia-smi does not say.
    """
    answer = ask_nvidia_smi("--query-gpu=name")
    if answer is not None and answer.status is None:
        raise BuildError(
            f"nvidia-smi does not say whether there is a GPU ({answer.error}); try again, or "
            "choose: hvd-elastic build-horovod --with-nccl or --without-nccl, in a checkout: "
            "make horovod ARGS=--without-nccl"
        )
    return answer is not None and not answer.error and bool(answer.lines)


def torch_cuda() -> str | None:
    """Return the CUDA version that the installed PyTorch is for, or None."""
    return _torch_facts()["cuda"]


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
    if distribution.read_text("METADATA") is None:  # pip has removed it, and left a file of ours
        return None
    return (distribution.read_text(INSTALLED_BUILD_FILE) or "").strip()


def ask_horovod(
    framework: str,
    timeout_s: float | None = None,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> tuple[dict[str, bool] | None, str]:
    """Import the installed Horovod in a new process for one framework.

    One process for both would not notice that it works for each alone.

    Returns:
        What it was built with; or None, and what the process wrote on stderr.
    """
    try:
        done = run(
            [sys.executable, "-c", _ASK_HOROVOD, framework],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s} s"
    if done.returncode != 0:
        return None, done.stderr.strip() or f"status {done.returncode}"
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def has_library(framework: str) -> bool:
    """Return whether the installed Horovod was compiled for a framework; nothing is imported."""
    spec = importlib.util.find_spec("horovod")
    folders = (spec.submodule_search_locations or []) if spec else []
    return any(any(Path(folder, framework).glob("mpi_lib*.so")) for folder in folders)


def _torch_facts() -> dict[str, str | None]:
    """Return versions from torch/version.py, since importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    found: dict[str, object] = {}
    if spec is not None and spec.origin is not None:
        version = Path(spec.origin).with_name("version.py")
        if version.is_file():
            found = runpy.run_path(str(version))
    wanted = {name: found.get(name) for name in ("__version__", "cuda")}
    return {name: None if value is None else str(value) for name, value in wanted.items()}


def why_left_out(cuda: str | None) -> str | None:
    """Return why Horovod is not built for the installed TensorFlow; None: it is, or there is none.

    Args:
        cuda: CUDA version of the build.
    """
    version = tensorflow_version()
    if version is None:
        return None
    if cuda is not None:
        return (
            f"TensorFlow {version} is left out: what Horovod has for it on GPUs includes headers "
            "that it no longer ships; --without-nccl builds for both frameworks on CPUs"
        )
    why = why_no_tensorflow(version, version_of("keras"), {})
    return None if why is None else f"TensorFlow is left out: {why}"


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
