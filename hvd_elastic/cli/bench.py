"""``hvd-elastic bench``: starts, joins, leaves and failures beside peers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hvd_elastic.cli.numbers import number_option, whole_number_option
from hvd_elastic.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["app", "elasticity", "startup"]

_EVERYTHING = 3

Repetitions = Annotated[int, whole_number_option("--repetitions", "-n", help="measured rounds")]
Output = Annotated[
    Path | None, typer.Option("--out", "-o", help="write the figures to this JSON file as well")
]
Loopback = Annotated[
    bool, typer.Option("--loopback", help="hosts without network namespaces (no root needed)")
]
Json = Annotated[bool, typer.Option("--json", help="print the figures as JSON, not as tables")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="tell each measurement (stderr)")]

app = typer.Typer(
    help=(
        "Measure on virtual hosts of this machine, beside stock Horovod and others.\n\n"
        "Without a name, all benchmarks are run. They take minutes and want an idle machine: its "
        "load is written beside every figure."
    ),
    epilog="Example: hvd-elastic bench startup --repetitions 5 --out startup.json",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def everything(ctx: typer.Context) -> None:
    """Run all benchmarks when none is named."""
    if ctx.invoked_subcommand is None:
        startup(repetitions=_EVERYTHING, verbose=True)
        elasticity(repetitions=_EVERYTHING, verbose=True)


@app.command("startup")
def startup(
    repetitions: Repetitions = 3,
    out: Output = None,
    loopback: Loopback = False,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """From the command to the first finished training step, on three hosts.

    Example: hvd-elastic bench startup --repetitions 5
    """
    from hvd_elastic.bench.startup import (
        measure_startup,
        show_startup,
        startup_as_json,
        write_startup,
    )

    _check(out)
    with _Progress(verbose) as say:
        result = measure_startup(repetitions, say, loopback=loopback)
    if out is not None:
        write_startup(result, out)
    _show(result, startup_as_json, show_startup, json_output)


@app.command("elasticity")
def elasticity(
    rows: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="rows of the table, as in 1,3,6-8 (default: all)"),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(metavar="LIST", help="who is measured, of ours, horovod, torchrun, torchft"),
    ] = "ours,horovod,torchrun,torchft",
    repetitions: Repetitions = 3,
    limit: Annotated[
        float,
        number_option(
            "--limit",
            above=True,
            metavar="SECONDS",
            help="patience with a job that does not go on",
        ),
    ] = 90.0,
    etr: Annotated[
        float,
        number_option(
            "--etr", metavar="MINUTES", help="training with a random kill every 10 s, 0 for none"
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="of the random kills")] = 0,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="look into our own stall in rows 1, 3 and 4 as well")
    ] = False,
    out: Output = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """What joins, leaves and failures cost: ours beside Horovod, torchrun and torchft.

    The same workload on the same virtual hosts, seen by one clock. Needs root. Peers that are not
    installed are put into an environment in your cache folder; one that cannot be is left out.

    Example: hvd-elastic bench elasticity --rows 1,3,4 --repetitions 5 --out elasticity.json
    """
    from hvd_elastic.bench.elasticity.measure import (
        elasticity_as_json,
        measure_elasticity,
        parse_peers,
        show_elasticity,
        write_elasticity,
    )
    from hvd_elastic.bench.elasticity.rows import ROWS, parse_rows

    _check(out)
    chosen = ROWS if rows is None else parse_rows(rows)
    launchers = parse_peers(peers)
    with _Progress(verbose) as say:
        result = measure_elasticity(
            chosen,
            launchers,
            repetitions,
            say,
            limit_s=limit,
            etr_minutes=etr,
            breakdown=breakdown,
            seed=seed,
        )
    if out is not None:
        write_elasticity(result, out)
    _show(result, elasticity_as_json, show_elasticity, json_output)


def _check(out: Path | None) -> None:
    if out is not None and not out.absolute().parent.is_dir():
        # Found out now, not after minutes of measuring.
        raise UsageError(f"--out {out}: the folder {out.absolute().parent} does not exist")


class _Progress:
    """One changing line on a terminal; lines with --verbose or off a terminal; all on stderr."""

    def __init__(self, verbose: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._verbose = verbose or not self._console.is_terminal
        self._status = self._console.status("making virtual hosts")

    def __enter__(self) -> Callable[[str], None]:
        # As with Ctrl-C: jobs and virtual hosts are ended on the way out.
        signal.signal(signal.SIGTERM, _terminated)
        if not self._verbose:
            self._status.start()
        return self._say

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def _say(self, text: str) -> None:
        if self._verbose:
            self._console.print(text, highlight=False, soft_wrap=True)
        else:
            self._status.update(text)


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _show(
    result: dict[str, Any],
    as_json: Callable[[dict[str, Any]], dict[str, Any]],
    show: Callable[[dict[str, Any], Any], None],
    json_output: bool,
) -> None:
    import json
    from dataclasses import asdict

    from rich.console import Console

    if json_output:
        print(json.dumps({"conditions": asdict(result["conditions"]), **as_json(result)}, indent=1))
    else:
        # Off a terminal rich would squeeze the tables into 80 columns.
        console = Console()
        show(result, console if console.is_terminal else Console(width=180))
