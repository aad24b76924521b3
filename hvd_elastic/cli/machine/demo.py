"""Implement ``hvd-elastic demo``: elastic training on virtual hosts of this machine."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated

import typer

from hvd_elastic.cli.options import AsJson, whole_number_option
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import unfiltered
from hvd_elastic.frameworks import TORCH_REQUIREMENT


def demo(
    loopback: Annotated[
        bool, typer.Option("--loopback", help="hosts without network namespaces (no root needed)")
    ] = False,
    epochs: Annotated[int, whole_number_option("--epochs", help="how long to train")] = 70,
    as_json: AsJson = False,
) -> None:
    """Train on virtual hosts of this machine while hosts join, leave and fail.

    A small network learns handwritten digits on two of three virtual hosts; the third joins, one
    leaves and comes back, and a worker is killed. It takes two minutes and needs nothing but
    PyTorch and Horovod; the data comes with the package.

    Examples:
      hvd-elastic demo

      hvd-elastic demo --loopback --json
    """
    for package, mend in (
        ("torch", f"pip install '{TORCH_REQUIREMENT}'"),
        ("horovod", "hvd-elastic build-horovod"),
    ):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"the demo trains with {package}, which is not installed; run: {mend}")
    from rich.console import Console

    from hvd_elastic.bench.demo import play

    console = Console(file=unfiltered(sys.stderr if as_json else sys.stdout))
    status = play(console, loopback, epochs, as_json)
    if status:
        raise typer.Exit(status)
