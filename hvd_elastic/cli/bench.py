"""Implement ``hvd-elastic bench``: measurements of a user's own script and machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from hvd_elastic.cli.numbers import number_option
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words, number_words, plural

bench = typer.Typer(
    name="bench",
    help="Measure parts of a training script on this machine.",
    no_args_is_help=True,
    add_completion=False,
)


@bench.callback()
def _group() -> None:
    """Measure parts of a training script on this machine."""


@bench.command("input", context_settings={"allow_interspersed_args": False})
def input_(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="the training command, after --", metavar="-- COMMAND [ARG]..."),
    ] = None,
    seconds: Annotated[
        float, number_option("--seconds", above=True, help="how long to read")
    ] = 10.0,
    json_output: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Measure how fast a script's loader reads on this host, without training.

    The script runs up to its loop over the loader, as one process. The loader then reads with the
    script's own data set, transform and processes for some seconds, and the script ends. The result
    is the number of examples in a second, and the time of a step that this can feed.

    Examples:
      hvd-elastic bench input -- python train.py

      hvd-elastic bench input --seconds 30 --json -- python train.py --batch 256
    """
    from hvd_elastic.bench.input import measure_input

    if not command:
        raise UsageError(
            "no training command. Give it after --, for example: hvd-elastic bench input -- "
            "python train.py"
        )
    rate = measure_input(command, seconds)
    feeds_s = rate.batch_size / rate.examples_per_s
    if json_output:
        print(json.dumps({**asdict(rate), "examples_per_s": rate.examples_per_s}, indent=2))
        return
    cores = plural("core", rate.cores)
    by = "" if rate.processes is None else f" by {count(rate.processes, 'loader process')}"
    if rate.processes == 0:
        by = " by the training process itself, which does not train meanwhile (num_workers=0)"
    print(f"reads        {number_words(rate.examples_per_s)} examples/s{by}")
    if rate.cpu_s is not None:
        example_s = rate.cpu_s / rate.examples
        print(
            f"takes        {duration_words(example_s)} of a core for each example; "
            f"{rate.cpu_s / rate.seconds:.1f} of {rate.cores} {cores} were in use"
        )
    print(
        f"feeds        steps of {duration_words(feeds_s)} or longer with {rate.batch_size} "
        "examples on this host; a rank that is faster would wait"
    )
