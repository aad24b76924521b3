"""The programs ``runclust``, ``copyclust``, ``killclust`` and ``checkclust``.

``hvd-elastic cluster run|copy|kill|check|trust`` calls the same functions. Exit status: 0 if all
hosts succeeded, 1 if something failed and was reported by host, 2 for wrong usage.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

from hvd_elastic.cli.cluster.check import check, trust
from hvd_elastic.cli.cluster.copy import copy
from hvd_elastic.cli.cluster.kill import kill
from hvd_elastic.cli.cluster.run import run
from hvd_elastic.cli.entry import enter
from hvd_elastic.cli.options import as_command, group_of

cluster = group_of(
    "Run, copy, kill and check on all hosts of a hostfile.",
    {"run": run, "copy": copy, "kill": kill, "check": check, "trust": trust},
)


def _main(name: str, function: Callable[..., None]) -> None:
    # Batch systems end a process with TERM; handle it like Ctrl-C, which stops the hosts' commands.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    enter(name, as_command(name, function, help_option_names=["-h", "--help"]))


# The entry points of the programs.
runclust_main = partial(_main, "runclust", run)
copyclust_main = partial(_main, "copyclust", copy)
killclust_main = partial(_main, "killclust", kill)
checkclust_main = partial(_main, "checkclust", check)
