"""Options that several commands share, word for word."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SshConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--ssh-config",
        "-F",
        envvar="HVD_ELASTIC_SSH_CONFIG",
        help="ssh configuration (default: ~/.ssh/config)",
    ),
]

OptionalRun = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="Run id, or number or name of its job; the newest run if left out."
    ),
]
RequiredRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run id, or number or name of its job; see: hvd-elastic list, queue"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
EventsAsJson = Annotated[
    bool, typer.Option("--json", help="Print every event as a JSON line instead of text.")
]
