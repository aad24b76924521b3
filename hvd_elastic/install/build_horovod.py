"""Build Horovod for this Python environment once, keep the wheel, install it.

Horovod's newest source release (0.28.1) has six problems that ``horovod-0.28.1.patch`` in this
folder fixes: it does not compile with current versions of torch and gcc; a process in which
initialisation has failed can never initialise again; one that initialises again crashes if some
variables are set; if a peer dies in the middle of a message, the others wait for 30 s; ranks that
have nothing to exchange negotiate about it every millisecond; and a process that a data loader
forks may hang. The wheel is kept in the user's cache folder under a name made of everything that it
was compiled against, so another environment with the same versions gets it in seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_elastic.errors import BuildError
from hvd_elastic.frameworks import (
    TENSORFLOW_REQUIREMENTS,
    TORCH_REQUIREMENT,
    install_command,
    version_of,
)
from hvd_elastic.hosts.remote_python import FROM_NO_WORKING_FOLDER
from hvd_elastic.install.horovod_wheel import (
    HOROVOD_VERSION,
    INSTALLED_BUILD_FILE,
    PIP_CUDA,
    RECORD,
    BuildInputs,
    ask_horovod,
    assemble_toolkit,
    cached_wheel,
    check_kept,
    find_cuda_home,
    find_nccl_header,
    find_nccl_library,
    installed_build,
    sha256_of,
    toolkit_packages,
    wheel_cache,
)
from hvd_elastic.install.prerequisites import (
    BUILD_REQUIREMENTS,
    PREREQUISITES,
    RUN_REQUIREMENTS,
    SYSTEM_FOLDERS,
    Purpose,
    apt_command,
    build_folder,
    check_build_space,
    has_apt,
    missing,
    pip_arguments,
)
from hvd_elastic.install.quiet import make_percentage, run_quietly
from hvd_elastic.programs.usable import usable_cores, usable_memory
from hvd_elastic.records.process_lock import lock_held

PATCH = Path(__file__).resolve().with_name(f"horovod-{HOROVOD_VERSION}.patch")

# Memory for each compiler: the largest one that was seen, with PyTorch 2.13 and gcc 12.
MEMORY_PER_JOB_BYTES = 2_400_000_000

# `-m pip` would run a pip.py of the working folder.
_RUN_PIP = f"{FROM_NO_WORKING_FOLDER}import runpy; runpy.run_module('pip', None, '__main__', True)"
_PIP = (sys.executable, "-c", _RUN_PIP, "--disable-pip-version-check", "--no-input")
# The line of Horovod's CMakeLists.txt that compiles the XLA operations.
_XLA_SOURCE = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n'


class UnfitWheelError(BuildError):
    """The installed wheel does not import, or lacks a part that it was to be built with."""


def patch_digest() -> str:
    """Return the SHA-256 of the patch."""
    return hashlib.sha256(PATCH.read_bytes()).hexdigest()


def prepare_source(source: Path, inputs: BuildInputs, patch: Path = PATCH) -> None:
    """Apply a patch, completely or not at all, and adapt the source to these inputs.

    Horovod's XLA operations are not compiled: since version 2.16 TensorFlow does not ship the
    headers that they include.

    Raises:
        BuildError: the source is not the release that the patch was made for.
    """
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(patch)],
        cwd=source,
        # Inside another repository git would look for the paths there and change nothing.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(source.resolve().parent)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BuildError(
            f"{patch.name} does not fit the source, which is not the release that it was made "
            f"for:\n{done.stderr.strip()}"
        )
    if inputs.tensorflow is not None:
        cmake = source / "horovod" / "tensorflow" / "CMakeLists.txt"
        text = cmake.read_text(encoding="utf-8")
        if text.count(_XLA_SOURCE) != 1:
            raise BuildError(
                f"{cmake.relative_to(source)} has no line {_XLA_SOURCE.strip()!r} to drop for "
                f"TensorFlow {inputs.tensorflow}; the source is not Horovod {HOROVOD_VERSION}"
            )
        cmake.write_text(text.replace(_XLA_SOURCE, ""), encoding="utf-8")


def build_environment(
    inputs: BuildInputs,
    base: Mapping[str, str],
    *,
    jobs: int,
    cuda_home: Path | None = None,
    nccl: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return environment variables that make Horovod's setup.py build exactly ``inputs``.

    Frameworks and transports in the inputs are required, so that the build fails instead of
    silently leaving one out; all others are disabled.

    Args:
        base: variables to pass on.
        jobs: number of compilers that run at the same time.
        cuda_home: folder of the CUDA toolkit, for a build with CUDA.
        nccl: variables that tell where NCCL is, from :func:`nccl_variables`.
    """
    environment = {
        name: value
        for name, value in base.items()
        if not name.startswith(("HOROVOD_WITH", "HOROVOD_GPU"))
        # without the job server of an outer make, and without generators that print no percentage
        and name not in ("MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "CMAKE_GENERATOR", "GNUMAKEFLAGS")
    }
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), base.get("PATH", os.defpath), *SYSTEM_FOLDERS]
    )
    environment["MAKEFLAGS"] = f"-j{jobs}"
    environment["HOROVOD_WITH_GLOO"] = "1"
    environment["HOROVOD_WITHOUT_MXNET"] = "1"
    for part, version in (
        ("PYTORCH", inputs.torch),
        ("TENSORFLOW", inputs.tensorflow),
        ("MPI", inputs.mpi),
    ):
        environment[f"HOROVOD_{'WITHOUT' if version is None else 'WITH'}_{part}"] = "1"
    # the bundled Gloo declares a minimum version that CMake 4 refuses
    environment["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
    if inputs.cuda is not None:
        environment["CUDA_HOME"] = environment["HOROVOD_CUDA_HOME"] = str(cuda_home)
        environment["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        environment = {**(nccl or {}), **environment}
    return environment


def provide_toolkit(inputs: BuildInputs, work: Path, log: Path) -> Path | None:
    """Return the CUDA toolkit to compile with: this machine's, or one installed by pip.

    Raises:
        BuildError: pip cannot install it.
    """
    if inputs.cuda is None:
        return None
    home = find_cuda_home()
    if home is not None:
        return home
    target = work / "cuda"
    packages = pip_arguments(toolkit_packages(inputs.cuda), work)
    run_quietly(
        [*_PIP, "install", "--target", str(target), *packages],
        label=f"Downloading the compiler of CUDA {inputs.cuda}",
        log=log,
    )
    return assemble_toolkit(target, inputs.cuda)


def nccl_variables(work: Path) -> dict[str, str]:
    """Return variables that tell Horovod's build where NCCL is; those of the user go first."""
    header = find_nccl_header()
    if header is None:
        return {}
    found = {"HOROVOD_NCCL_INCLUDE": str(header.parent)}
    library = find_nccl_library(header)
    if library is not None:
        # The linker needs the library under a name without a version number.
        (work / "nccl").mkdir()
        (work / "nccl" / "libnccl.so").symlink_to(library)
        found |= {"HOROVOD_NCCL_LIB": str(work / "nccl"), "HOROVOD_NCCL_LINK": "SHARED"}
    return found


def parallel_jobs(cores: int, memory_bytes: int) -> int:
    """Return the number of compilers to run at the same time: one per core, if memory allows.

    >>> parallel_jobs(cores=16, memory_bytes=6_000_000_000)
    2
    """
    return max(1, min(cores, memory_bytes // MEMORY_PER_JOB_BYTES))


def check_machine(inputs: BuildInputs, folder: Path) -> None:
    """Check everything that a build needs before it begins.

    Raises:
        BuildError: something is missing; names it and the command that installs it.
    """
    if not inputs.frameworks:
        raise BuildError(
            f"neither PyTorch nor TensorFlow is installed for {sys.executable}, and Horovod is "
            f"compiled against them; run: {install_command(TORCH_REQUIREMENT)}\n"
            f"or: {install_command(*TENSORFLOW_REQUIREMENTS)}"
        )
    if inputs.cuda is not None:
        _check_cuda(inputs.cuda, inputs.nccl)
    lacking = missing(item for item in PREREQUISITES if item.purpose is Purpose.BUILD)
    if lacking:
        names = ", ".join(item.name for item in lacking)
        mend = apt_command(lacking) if has_apt() else "install them with your package manager"
        raise BuildError(f"Horovod cannot be built without {names}; run: {mend}")
    check_build_space(folder)


def _check_cuda(cuda: str, nccl: str | None) -> None:
    or_without = (
        "or, for a machine without a GPU, take a PyTorch for CPUs or build with "
        "`hvd-elastic build-horovod --without-nccl`"
    )
    if find_cuda_home() is None and not toolkit_packages(cuda):
        raise BuildError(
            f"PyTorch is for CUDA {cuda}, and there is no nvcc to compile Horovod for it; install "
            f"NVIDIA's package cuda-nvcc-{cuda.replace('.', '-')} (or name the toolkit's folder in "
            f"CUDA_HOME), or take a PyTorch for CUDA {PIP_CUDA}, whose compiler pip can bring, "
            f"{or_without}"
        )
    if nccl is None:
        raise BuildError(
            f"PyTorch is for CUDA {cuda}, and there is no nccl.h; install NVIDIA's package "
            "libnccl-dev (or name its folder in HOROVOD_NCCL_HOME), " + or_without
        )


def build_wheel(inputs: BuildInputs, work: Path, log: Path, jobs: int, patch: Path = PATCH) -> Path:
    """Download, patch and compile Horovod in ``work``; return the path of the wheel."""
    _install_missing(BUILD_REQUIREMENTS, "build requirements", log)
    run_quietly(
        [
            *_PIP, "download", "--no-binary", "horovod", "--no-build-isolation",
            "--dest", str(work), *pip_arguments(["horovod"], work),
        ],
        label=f"Downloading Horovod {inputs.horovod}",
        log=log,
    )  # fmt: skip
    cuda_home = provide_toolkit(inputs, work, log)
    source = unpack_sdist(work / f"horovod-{inputs.horovod}.tar.gz", work)
    prepare_source(source, inputs, patch)
    print(
        f"Building {inputs.describe()}, {jobs} compiler{'s' if jobs > 1 else ''} at once",
        flush=True,
    )
    run_quietly(
        [
            *_PIP, "wheel", "-v", "--no-deps", "--no-build-isolation",
            "--wheel-dir", str(work / "wheel"), str(source),
        ],
        label="Building Horovod",
        log=log,
        environment=build_environment(
            inputs, os.environ, jobs=jobs, cuda_home=cuda_home, nccl=nccl_variables(work)
        ),
        percentage=make_percentage,
    )  # fmt: skip
    wheels = sorted((work / "wheel").glob("horovod-*.whl"))
    if len(wheels) != 1:
        raise BuildError(f"the build left {len(wheels)} wheels instead of one; the log: {log}")
    return wheels[0]


def unpack_sdist(archive: Path, folder: Path) -> Path:
    """Unpack the source release, whose digest pip has compared; return its folder."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def install_wheel(wheel: Path, inputs: BuildInputs, log: Path) -> None:
    """Install ``wheel``, import it in new processes, and record which build it is.

    Raises:
        BuildError: it cannot be installed or imported.
    """
    site = Path(sysconfig.get_path("platlib"))
    for old in site.glob(f"horovod-*.dist-info/{INSTALLED_BUILD_FILE}"):
        old.unlink()
    run_quietly(
        [
            *_PIP, "install", "--force-reinstall", "--no-deps", "--no-index", str(wheel),
        ],
        label="Installing Horovod",
        log=log,
    )  # fmt: skip
    for framework in inputs.frameworks:
        _check_import(framework, inputs, log)
    note = site / f"horovod-{inputs.horovod}.dist-info" / INSTALLED_BUILD_FILE
    note.write_text(inputs.name + "\n", encoding="utf-8")
    with note.with_name("RECORD").open("a", encoding="utf-8") as files:  # of pip, for its uninstall
        files.write(f"{note.relative_to(site)},,\n")


def _check_import(framework: str, inputs: BuildInputs, log: Path) -> None:
    """Import Horovod for one framework in a new process; check that it has all of ``inputs``."""
    built, why = ask_horovod(framework)
    if built is None:
        end = "\n".join(f"  {line}" for line in why.splitlines()[-8:])
        raise UnfitWheelError(f"the installed Horovod does not import for {framework}:\n{end}")
    wanted = {"gloo": True, "mpi": inputs.mpi is not None, "nccl": inputs.nccl is not None}
    lacking = [name for name, want in wanted.items() if want and not built[name]]
    if lacking:
        raise UnfitWheelError(
            f"Horovod was built for {framework} without {', '.join(lacking)}; the log: {log}"
        )


def keep_wheel(wheel: Path, inputs: BuildInputs, seconds: float) -> Path:
    """Copy a wheel into the cache, atomically, where no one else can change it."""
    folder = wheel_cache() / inputs.name
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{wheel.name}.partial"
    try:
        shutil.copyfile(wheel, partial)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    for path in (folder.parent, folder, partial):
        path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
    record = {
        "inputs": inputs.to_dict(),
        "sha256": sha256_of(partial),
        "seconds": round(seconds, 1),
        "built": int(time.time()),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    kept = folder / wheel.name
    partial.replace(kept)
    return kept


def provide_horovod(inputs: BuildInputs, *, rebuild: bool = False, jobs: int | None = None) -> None:
    """Install Horovod built from ``inputs``: keep what is installed, use the cache, or build it."""
    if not rebuild and installed_build() == inputs.name:
        print(f"{inputs.describe()} is installed")
        return
    if importlib.util.find_spec("pip") is None:
        again = f"{shlex.quote(sys.executable)} -m ensurepip"
        raise BuildError(
            f"{sys.executable} has no pip, which installs Horovod; run: {again}   (with uv: make "
            "the environment by `uv venv --seed`)"
        )
    cache = wheel_cache()
    log = cache / f"{inputs.name}.log"
    waiting = "Another build of the same Horovod is running; waiting for its wheel …"
    with lock_held(cache / f"{inputs.name}.lock", lambda: print(waiting, flush=True)):
        if not rebuild and installed_build() == inputs.name:
            print(f"{inputs.describe()} is installed")  # by another build, meanwhile
            return
        log.unlink(missing_ok=True)
        _install_missing(RUN_REQUIREMENTS, "what Horovod imports", log)
        wheel = None if rebuild else _fit_wheel(inputs)
        if wheel is None:
            kept = _build_and_install(inputs, log, jobs)
        else:
            kept = f"its wheel is kept in {wheel.parent}"
            try:
                install_wheel(wheel, inputs, log)
            except BuildError as error:
                if not (isinstance(error, UnfitWheelError) and _frameworks_import(inputs)):
                    raise BuildError(
                        f"{error}\n{kept}; to compile it again: hvd-elastic build-horovod --rebuild"
                    ) from error
                print(f"The kept wheel cannot be used and is built again: {error}", flush=True)
                try:
                    kept = _build_and_install(inputs, log, jobs)
                except BuildError as failed:
                    raise BuildError(
                        f"{failed}\nIt was built since the kept wheel cannot be used: {error}"
                    ) from failed
                if wheel.parent != cache / inputs.name:  # else the new one is in its place
                    with contextlib.suppress(OSError):
                        wheel.unlink()
        log.unlink(missing_ok=True)
    print(f"{inputs.describe()} is installed; {kept}")


def _frameworks_import(inputs: BuildInputs) -> bool:
    """Return whether the frameworks themselves import, each in a new process."""
    return all(
        subprocess.run(
            [sys.executable, "-c", f"{FROM_NO_WORKING_FOLDER}import {framework}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
        ).returncode
        == 0
        for framework in inputs.frameworks
    )


def _fit_wheel(inputs: BuildInputs) -> Path | None:
    """Return a kept wheel that nobody has changed; one that is damaged is removed."""
    wheel = cached_wheel(inputs)
    if wheel is not None:
        try:
            check_kept(wheel)
        except BuildError as error:
            print(f"The kept wheel cannot be used and is built again: {error}", flush=True)
            wheel.unlink()
            return None
    return wheel


def _build_and_install(inputs: BuildInputs, log: Path, jobs: int | None) -> str:
    """Build a wheel, keep it, which may fail, and install it; return where it is kept.

    It stays if it cannot be installed, as on a full disk, but not if it is of no use.
    """
    began = time.monotonic()
    temporary = build_folder()
    check_machine(inputs, temporary)
    if jobs is None:
        jobs = parallel_jobs(usable_cores(), usable_memory().available)
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-build-", dir=temporary) as work:
        wheel = build_wheel(inputs, Path(work), log, jobs)
        try:
            wheel = keep_wheel(wheel, inputs, time.monotonic() - began)
            kept = f"its wheel is kept in {wheel.parent}"
        except OSError as error:
            kept = (
                f"its wheel is not kept, since {wheel_cache()} cannot be written: {error.strerror}"
            )
        try:
            install_wheel(wheel, inputs, log)
        except UnfitWheelError:
            wheel.unlink()
            raise
        return kept


def _install_missing(packages: Sequence[str], what: str, log: Path) -> None:
    lacking = [name for name in packages if version_of(name) is None]
    if lacking:
        with tempfile.TemporaryDirectory(prefix="hvd_elastic-build-") as work:
            run_quietly(
                [*_PIP, "install", *pip_arguments(lacking, Path(work))],
                label=f"Installing {what}",
                log=log,
            )
