"""The programs ``runclust``, ``copyclust``, ``killclust`` and ``checkclust``.

``hvd-elastic cluster run|copy|kill|check|trust`` calls the same functions. Exit status: 0 if all
hosts succeeded, 1 if something failed and was reported by host, 2 for wrong usage.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import typer
import typer.core
import typer.main

from hvd_elastic.cli.cluster.check import check, trust
from hvd_elastic.cli.cluster.copy import copy
from hvd_elastic.cli.cluster.kill import kill
from hvd_elastic.cli.cluster.run import HostfileFirst, run
from hvd_elastic.cli.entry import enter

_PASS_ON = {"allow_interspersed_args": False}

cluster = typer.Typer(
    name="cluster",
    help="Run, copy, kill and check on all hosts of a hostfile.",
    no_args_is_help=True,
    add_completion=False,
)
cluster.command("run", cls=HostfileFirst, context_settings=_PASS_ON)(run)
cluster.command("copy")(copy)
cluster.command("kill")(kill)
cluster.command("check")(check)
cluster.command("trust")(trust)


def runclust_main() -> None:
    """Entry point of ``runclust``."""
    _main("runclust", run, HostfileFirst, _PASS_ON)


def copyclust_main() -> None:
    """Entry point of ``copyclust``."""
    _main("copyclust", copy)


def killclust_main() -> None:
    """Entry point of ``killclust``."""
    _main("killclust", kill)


def checkclust_main() -> None:
    """Entry point of ``checkclust``."""
    _main("checkclust", check)


def _main(
    name: str,
    function: Callable[..., None],
    cls: type[typer.core.TyperCommand] = typer.core.TyperCommand,
    settings: dict[str, Any] | None = None,
) -> None:
    app = typer.Typer(add_completion=False)
    app.command(
        name, cls=cls, context_settings={"help_option_names": ["-h", "--help"], **(settings or {})}
    )(function)
    # Batch systems end a process with TERM; handle it like Ctrl-C, which stops the hosts' commands.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    enter(name, typer.main.get_command(app))
