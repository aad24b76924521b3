"""The flags of ``run`` by which a user asks for the hosts of an engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from hvd_elastic.engines.base import INSIDE


@dataclass(frozen=True)
class EngineFlags:
    """A flag for each engine that a run can be started in."""

    slurm: Annotated[
        bool,
        typer.Option("--slurm", help=f"train on {INSIDE['slurm']} (the default inside of one)"),
    ] = False

    @property
    def asked(self) -> str | None:
        """Return the engine that is asked for."""
        return next((name for name, given in asdict(self).items() if given), None)
