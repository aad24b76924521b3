"""Implement ``hvd-elastic build-horovod``: compile Horovod for this environment, install it."""

from __future__ import annotations

from typing import Annotated

from hvd_elastic.cli.options import option, whole_number_option
from hvd_elastic.errors import BuildError


def build_horovod(
    rebuild: Annotated[bool, option("build even if a wheel exists", "--rebuild")] = False,
    without_mpi: Annotated[bool, option("leave Open MPI out", "--without-mpi")] = False,
    without_tensorflow: Annotated[
        bool, option("leave TensorFlow out", "--without-tensorflow")
    ] = False,
    nccl: Annotated[
        bool | None,
        option(
            "include CUDA and NCCL, or leave them out (default: by whether there is a GPU)",
            "--with-nccl/--without-nccl",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        whole_number_option("compilers at once (default: by cores and memory)", "--jobs"),
    ] = None,
    print_name: Annotated[
        bool, option("print the name of the build and end", "--print-name")
    ] = False,
) -> None:
    """Build Horovod for this Python environment, keep the wheel, install it.

    Horovod is patched and compiled against the installed PyTorch, TensorFlow, or both. That takes
    some minutes once; the wheel is kept in your cache folder, and another environment with the same
    versions installs it in seconds.

    Examples:
      hvd-elastic build-horovod

      hvd-elastic build-horovod --without-mpi --jobs 4

      hvd-elastic build-horovod --rebuild
    """
    from hvd_elastic.install.build_horovod import patch_digest, provide_horovod
    from hvd_elastic.install.horovod_wheel import detect_inputs, torch_cuda, why_left_out

    inputs = detect_inputs(
        patch_digest(),
        with_tensorflow=not without_tensorflow,
        with_mpi=not without_mpi,
        with_nccl=nccl,
    )
    if print_name:
        print(inputs.name)
        return
    if nccl is None and inputs.cuda is None and (cuda := torch_cuda()):
        print(
            f"No GPU here, so Horovod is built for CPUs; for CUDA {cuda} with NCCL: `make horovod` "
            "on a host with a GPU, or build-horovod --with-nccl",
            flush=True,
        )
    if not without_tensorflow and (why := why_left_out(inputs.cuda)):
        print(why, flush=True)
    try:
        provide_horovod(inputs, rebuild=rebuild, jobs=jobs)
    except PermissionError as error:
        raise BuildError(
            f"{error.filename} cannot be written; the wheel's folder is under XDG_CACHE_HOME, the "
            "build's under TMPDIR: name others there"
        ) from error
