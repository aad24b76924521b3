"""Find CUDA's compiler and NCCL for building Horovod for GPUs.

PyTorch from PyPI installs CUDA's libraries and NCCL as packages, but no compiler. For CUDA 13.0 the
compiler is available as packages too, so a machine needs only the GPU's driver:
:func:`toolkit_packages` returns their names, :func:`assemble_toolkit` makes the folder that a build
expects.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from hvd_elastic.install.prerequisites import find_program, pinned_version

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
