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
