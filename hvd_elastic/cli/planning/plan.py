"""Implement ``hvd-elastic plan``: predict the performance of a run on other numbers of hosts."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hvd_elastic.cli.options import (
    AsJson,
    SshConfigOption,
    argument,
    hostfile_option,
    number_option,
    option,
    parse_duration,
    whole_number_option,
)
from hvd_elastic.cli.output import print_json, print_table
from hvd_elastic.errors import HostfileError, RunError, UsageError
from hvd_elastic.formatting import count, number_words

if TYPE_CHECKING:
    from hvd_elastic.policy.evidence import Evidence
    from hvd_elastic.policy.forecast import Forecast
    from hvd_elastic.policy.snapshot import HostOffer
    from hvd_elastic.records.run_folder import RunFolder


def plan(
    arguments: Annotated[
        list[str] | None,
        argument("run id, or number or name of its job (default: the newest run)", "[RUN]"),
    ] = None,
    hosts: Annotated[
        int | None,
        whole_number_option(
            "predict 1 to N hosts (default: the sizes that the hostfile allows)", "--hosts"
        ),
    ] = None,
    slots: Annotated[
        int | None,
        whole_number_option("slots of each host (default: as the run's hosts)", "--slots"),
    ] = None,
    price: Annotated[
        float | None,
        number_option("price of each host per hour (default: as in the hostfile)", "--price"),
    ] = None,
    target_examples: Annotated[
        float | None,
        number_option(
            "useful examples still to process, such as 5e7", "--target-examples", above=True
        ),
    ] = None,
    out: Annotated[
        Path | None, option("where to write the plots (default: in the run folder)")
    ] = None,
    probe: Annotated[
        bool, option("train on some sizes first; the command follows after --", "--probe")
    ] = False,
    hostfile: Annotated[Path | None, hostfile_option("hosts and slots for --probe")] = None,
    probe_for: Annotated[str, option("total training time of --probe", metavar="TIME")] = "2m",
    ssh_config: SshConfigOption = None,
    as_json: AsJson = False,
) -> None:
    """Predict throughput, goodput, time and cost of other sizes, with 80 % ranges.

    The prediction is based on the step times and the gradient noise measured in the run. Sizes that
    were timed are marked with *.

    Examples:
      hvd-elastic plan digits-3 --hosts 16

      hvd-elastic plan digits-3 --target-examples 5e7 --price 2.5 --json

      hvd-elastic plan --probe --hostfile hosts -- python train.py
    """
    from hvd_elastic.cli.jobs.naming import open_run
    from hvd_elastic.policy.evidence import replay
    from hvd_elastic.policy.forecast import forecast

    if probe:
        folder = _probed(hostfile, arguments or [], probe_for, ssh_config)
    else:
        if hostfile is not None or len(arguments or []) > 1:
            raise UsageError(
                "give one run, or --probe with --hostfile and the training command after --"
            )
        folder = open_run(arguments[0] if arguments else None)
    evidence = replay(folder.read_events())
    offers = _offers(folder)
    todo = _todo(folder, evidence) if target_examples is None else target_examples
    try:
        found = forecast(evidence, offers, hosts, slots, price, todo)
    except ValueError as error:
        raise RunError(f"run {folder.run_id}: {error}") from error
    notes = _notes(evidence, found, todo)
    if hosts is None:
        notes.append("The sizes are those that the run's hostfile allows; --hosts N shows others.")
    path = _write(folder, found, notes, out)
    if as_json:
        print_json(_as_json(folder, evidence, found, todo, path))
    else:
        _show(found, notes, path)


def _probed(
    hostfile: Path | None, command: Sequence[str], probe_for: str, ssh_config: Path | None
) -> RunFolder:
    from hvd_elastic.bench.background_run import probe
    from hvd_elastic.hosts.hostfile import parse_hostfile

    if hostfile is None or not command:
        raise UsageError(
            "--probe needs --hostfile and the training command, for example: hvd-elastic plan "
            "--probe --hostfile hosts -- python train.py"
        )
    for_s = parse_duration("--probe-for", probe_for)
    options = [] if ssh_config is None else ["--ssh-config", str(ssh_config)]
    found = parse_hostfile(hostfile).hosts
    return probe(
        hostfile, found, command, for_s, options, lambda what: print(what, file=sys.stderr)
    )


def _offers(folder: RunFolder) -> list[HostOffer]:
    """Return the run's hosts, with their prices if its hostfile can still be read."""
    from hvd_elastic.hosts.hostfile import parse_hostfile
    from hvd_elastic.policy.snapshot import HostOffer
    from hvd_elastic.records.summary import summarize

    prices: dict[str, float | None] = {}
    place = folder.read_run().get("hostfile")
    if place:
        try:
            prices = {host.name: host.price for host in parse_hostfile(place).hosts}
        except HostfileError:
            prices = {}
    hosts = summarize(folder.iter_events()).hosts
    return [HostOffer(name, slots, prices.get(name)) for name, slots in hosts]


def _todo(folder: RunFolder, evidence: Evidence) -> float | None:
    """Return the rest of the run's own target; None if it has none or has reached it."""
    target = folder.read_run().get("objective", {}).get("target")
    if not target or target <= evidence.done:
        return None
    return float(target) - evidence.done


def _notes(evidence: Evidence, found: Sequence[Forecast], todo: float | None) -> list[str]:

    worlds = sorted(evidence.timings.worlds)
    timed = ", ".join(f"{count(s, 'slot')} on {count(h, 'host')}" for h, s in worlds[:6])
    notes = [f"* timed by this run. In all: {timed}{' and more' if len(worlds) > 6 else ''}."]
    if all(hosts < 2 for hosts, _ in worlds) and found[-1].hosts > 1:
        notes.append(
            "Hosts were never timed together: what the link between them costs is a guess."
        )
    unknown = [entry for entry in found if entry.unknown]
    if unknown:
        notes.append(
            f"Not known: with {count(unknown[0].slots, 'slot')}, {unknown[0].unknown}. Let the run "
            "train on that many for some ten seconds (hvd-elastic scale), or on machines of their "
            "own."
        )
    if math.isfinite(evidence.noise):
        notes.append(
            f"The gradient noise scale is taken to stay at {number_words(evidence.noise)} examples."
        )
    if todo is not None:
        notes.append(f"Time and cost are for {number_words(todo)} useful examples.")
    return notes


def _write(
    folder: RunFolder, found: Sequence[Forecast], notes: Sequence[str], out: Path | None
) -> Path:
    from hvd_elastic.views.page import write_page
    from hvd_elastic.views.plan_page import render_plan

    path = folder.path / "plan.html" if out is None else out
    write_page(path, render_plan(folder.run_id, found, notes))
    return path


def _as_json(
    folder: RunFolder,
    evidence: Evidence,
    found: Sequence[Forecast],
    todo: float | None,
    path: Path,
) -> dict[str, Any]:
    unknown = {"global_batch_size": None, "accumulation_steps": None}
    entries = [{**dataclasses.asdict(each), **(unknown if each.unknown else {})} for each in found]
    return {
        "run_id": folder.run_id,
        "path": str(path),
        "noise_scale": evidence.noise,
        "target_examples": todo,
        "timed": sorted(evidence.timings.worlds),
        "forecasts": entries,
    }


def _show(found: Sequence[Forecast], notes: Sequence[str], path: Path) -> None:
    from hvd_elastic.views.plan_page import plan_cells

    heads, rows = plan_cells(found)
    print_table([heads, *rows])
    print()
    for note in notes:
        print(note)
    print(f"plots: {path}")
