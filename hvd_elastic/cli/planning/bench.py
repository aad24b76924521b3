"""Implement ``hvd-elastic bench``: measurements of a user's cluster, script and machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hvd_elastic.cli.options import (
    AsJson,
    SshConfigOption,
    argument,
    command,
    group_of,
    hostfile_option,
    number_option,
    option,
    parse_duration,
    parse_whole_number,
    whole_number_option,
)
from hvd_elastic.cli.output import print_json, print_table
from hvd_elastic.cli.planning.scaling_tables import (
    LiveTable,
    check_out,
    notes_of,
    progress_line,
    rate_words,
    tables_of,
    write_scaling,
)
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words, number_words, plural
from hvd_elastic.json_text import parse_json

_IMAGENET = 1_281_167
"""Number of training pictures of ImageNet (ILSVRC 2012)."""


@command(pass_on=True)
def input_(
    command: Annotated[
        list[str] | None, argument("the training command, after --", "-- COMMAND [ARG]...")
    ] = None,
    seconds: Annotated[float, number_option("how long to read", "--seconds", above=True)] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a script's loader reads on this host, without training.

    The script runs up to its loop over the loader, as one process. The loader then reads with the
    script's own dataset, transform and processes for some seconds, and the script ends. The result
    is the number of examples in a second, and the time of a step that this can feed.

    Examples:
      hvd-elastic bench input -- python train.py

      hvd-elastic bench input --seconds 30 --json -- python train.py --batch 256
    """
    from hvd_elastic.bench.background_run import measure_input

    if not command:
        raise UsageError(
            "no training command. Give it after --, for example: hvd-elastic bench input -- "
            "python train.py"
        )
    rate = measure_input(command, seconds)
    feeds_s = rate.batch_size / rate.examples_per_s
    if as_json:
        print_json({**asdict(rate), "examples_per_s": rate.examples_per_s})
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
    print(f"faster by    {rate.remedy}")


def synthetic(
    hostfile: Annotated[Path, hostfile_option("hosts and slots", "--hosts")],
    np: Annotated[
        str | None,
        option("numbers of slots (default: 1, 2, 4, … and all)", "--np", "-n", metavar="N,N,…"),
    ] = None,
    model: Annotated[
        str, option("resnet50, gpt2, or module:function", metavar="MODEL")
    ] = "resnet50",
    framework: Annotated[str, option("torch or tensorflow", metavar="NAME")] = "torch",
    batch_size: Annotated[
        int, whole_number_option("examples of each slot in a step", "--batch-size")
    ] = 64,
    precision: Annotated[str, option("fp32, fp16 or bf16", metavar="NAME")] = "fp32",
    emulate_device: Annotated[
        str | None,
        option(
            "compute nothing: a device that takes A + B ms for each example of a step",
            metavar="A,B",
        ),
    ] = None,
    seconds: Annotated[
        float, number_option("how long to measure each size", "--seconds", above=True)
    ] = 10.0,
    examples: Annotated[
        int, whole_number_option("examples of an epoch, for the cost", "--examples")
    ] = _IMAGENET,
    epochs: Annotated[
        float, number_option("epochs of a training, for the cost", "--epochs", above=True)
    ] = 90.0,
    deadline: Annotated[
        str | None, option("name the cheapest size that trains within it", metavar="TIME")
    ] = None,
    out: Annotated[
        list[Path] | None,
        option("write the result to this .json, .csv, .html or .png file; repeatable"),
    ] = None,
    ssh_config: SshConfigOption = None,
    as_json: AsJson = False,
) -> None:
    """Measure how training scales with the number of slots, on synthetic data.

    A model trains on random data that stays the same, so that only computation and communication
    count. All sizes are measured in one elastic run, which is rescaled from one to the next.

    Examples:
      hvd-elastic bench synthetic --hostfile hosts --np 1,2,4,8

      hvd-elastic bench synthetic -H hosts --precision bf16 --out now.json --out now.png

      hvd-elastic bench synthetic -H hosts --epochs 90 --deadline 12h
    """
    from hvd_elastic.bench.scaling import Settings
    from hvd_elastic.bench.synthetic import measure_synthetic
    from hvd_elastic.hosts.hostfile import parse_hostfile

    hosts = parse_hostfile(hostfile).hosts
    slots = sum(host.slots for host in hosts)
    settings = Settings(framework, model, batch_size, precision, _emulated(emulate_device))
    settings.check()
    deadline_h = None if deadline is None else parse_duration("--deadline", deadline) / 3600
    if deadline_h and any(host.price is None for host in hosts):
        raise UsageError("--deadline chooses by cost: give every host of the hostfile a price=")
    check_out(out or [])
    options = [] if ssh_config is None else ["--ssh-config", str(ssh_config)]
    sizes = _sizes(np, slots)
    with LiveTable(sizes).shown() as progress:
        found = measure_synthetic(hostfile, hosts, sizes, settings, seconds, options, progress)
    tables = tables_of(found, examples, epochs)
    if as_json:
        print_json(found.as_json())
    else:
        for heading, rows in tables:
            print(f"{heading}:")
            print_table(rows)
            print()
    for path in out or []:
        write_scaling(path, found, tables)
    if not as_json:
        for note in notes_of(found, examples, epochs, deadline_h):
            print(note)


def _emulated(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        constant, each = (float(word) / 1000 for word in text.split(","))
    except ValueError:
        constant = each = -1.0
    if min(constant, each) < 0 or constant + each == 0:
        raise UsageError(
            f"--emulate-device takes two times in ms, A,B such as 20,3.1, not '{text}'"
        )
    return constant, each


def _sizes(text: str | None, slots: int) -> list[int]:
    if text is None:
        return sorted({*(1 << power for power in range(slots.bit_length())), slots})
    return [parse_whole_number("--np", word) for word in text.split(",")]


def allreduce(
    hostfile: Annotated[Path, hostfile_option("hosts and slots", "--hosts")],
    np: Annotated[
        int | None, whole_number_option("number of slots (default: all)", "--np", "-n")
    ] = None,
    most: Annotated[str, option("largest tensor, such as 64MB", "--max", metavar="SIZE")] = "1GB",
    link: Annotated[
        float | None,
        number_option("rate of each host's link, to compare [Gbit/s]", "--link", above=True),
    ] = None,
    ssh_config: SshConfigOption = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast the slots sum tensors, from 1 KiB up, as they sum gradients.

    Algorithm and bus bandwidth are those of nccl-tests: size / time, and that times 2 (n - 1) / n,
    which is what a link carries in each direction in a ring of n ranks, one on each host.

    Examples:
      hvd-elastic bench allreduce --hostfile hosts

      hvd-elastic bench allreduce -H hosts --np 4 --max 64MB --link 10
    """
    from hvd_elastic.bench.allreduce import measure_allreduce
    from hvd_elastic.formatting import bytes_words
    from hvd_elastic.hosts.hostfile import parse_hostfile

    options = [] if ssh_config is None else ["--ssh-config", str(ssh_config)]
    hosts = parse_hostfile(hostfile).hosts
    with progress_line() as say:
        found = measure_allreduce(hostfile, hosts, np, _bytes(most), options, say)
    if as_json:
        print_json(found.as_json())
        return
    rows = [["size", "time", "algorithm", "bus", *(["of the link"] if link else [])]]
    for each in found.sums:
        took = f"{1e3 * each.seconds:.3g} ms" if each.seconds < 1 else f"{each.seconds:.3g} s"
        rates = [bytes_words(each.algorithm_bandwidth), bytes_words(each.bus_bandwidth)]
        share = [f"{100 * 8e-9 * each.bus_bandwidth / link:.0f} %"] if link else []
        size = bytes_words(each.size)
        rows.append([size, took, *(f"{rate}/s" for rate in rates), *share])
    print_table(rows)
    print(f"\n{count(found.slots, 'slot')} on {count(found.hosts, 'host')}, float32")


def _bytes(text: str) -> int:
    units = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
    number, unit = text[:-2], text[-2:].upper()
    if (
        not number.isdigit()
        or unit not in units
        or not 1 << 10 <= int(number) * units[unit] <= 1 << 34
    ):
        raise UsageError(f"--max takes a size from 1KB to 16GB, such as 64MB, not '{text}'")
    return int(number) * units[unit]


def compare(
    first: Annotated[Path, argument("a result of bench synthetic", "A.json")],
    second: Annotated[Path, argument("another one", "B.json")],
    as_json: AsJson = False,
) -> None:
    """Tell which sizes of two results differ beyond the noise.

    Examples:
      hvd-elastic bench compare monday.json today.json

    Exit status: 0 if none is slower beyond the noise in the second, 1 if one is, 2 for results of
    different benchmarks.
    """
    from hvd_elastic.bench.scaling import compare as compare_results

    found = compare_results(_read(first), _read(second))
    if as_json:
        print_json([{**asdict(each), "differs": each.differs} for each in found])
    else:
        rows = [["slots", first.name, second.name, "change", "95 %", ""]]
        for each in found:
            words = "within the noise"
            if each.differs:
                words = "slower" if each.ratio < 1 else "faster"
            ends = (each.low, each.high)
            between = " to ".join(f"{100 * (end - 1):+.1f} %" for end in ends)
            change = f"{100 * (each.ratio - 1):+.1f} %"
            rates = (rate_words(each.first), rate_words(each.second))
            rows.append([str(each.slots), *rates, change, between, words])
        print_table(rows)
    if any(each.differs and each.ratio < 1 for each in found):
        raise typer.Exit(1)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read as a result of bench synthetic: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("sizes"), list):
        raise UsageError(f"{path} is no result of bench synthetic (made with --out FILE.json)")
    return found


bench = group_of(
    "Measure how training scales, and how fast a script reads.",
    {"input": input_, "synthetic": synthetic, "allreduce": allreduce, "compare": compare},
)
