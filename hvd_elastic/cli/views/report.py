"""Implement ``hvd-elastic report``: summarize runs, or a cluster of jobs, in an HTML file."""

# ruff: noqa: D301  (the backspace tells the command line to keep the lines of the examples)
from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from hvd_elastic.cli.jobs.naming import open_run
from hvd_elastic.cli.options import AsJson, OptionalRun, option
from hvd_elastic.cli.output import print_json, print_rows
from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words
from hvd_elastic.records.audit import AuditResult
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.summary import RunSummary
from hvd_elastic.records.wording import (
    left_out_words,
    metric_words,
    outcome_words,
    rescale_words,
    run_state,
    saved_words,
    skipped_words,
)


def report(
    run: OptionalRun = None,
    out: Annotated[
        Path | None, option("Where to write it; report.html in the run folder if left out.")
    ] = None,
    cluster: Annotated[
        bool, option("Report on a cluster that jobs share; RUN is its name.", "--cluster")
    ] = False,
    compare: Annotated[
        list[str] | None,
        option("Plot this run over it; may be repeated.", "--compare", metavar="RUN"),
    ] = None,
    open_: Annotated[bool, option("Open it in a browser.", "--open")] = False,
    as_json: AsJson = False,
) -> None:
    """Summarize a run, and plot it in one HTML file that needs no network.

    \b
    Examples:
      hvd-elastic report
      hvd-elastic report digits-3 --out digits.html --open
      hvd-elastic report digits-3 --compare digits-2
      hvd-elastic report --cluster gpus
    """
    from hvd_elastic.views.report import write_report

    if cluster:
        if compare:
            raise UsageError("--compare is for runs, and --cluster for the cluster of many jobs")
        path = _report_cluster(run, out, as_json=as_json)
        if open_:
            _open(path)
        return
    folder = open_run(run)
    if compare:
        path = folder.path / "comparison.html" if out is None else out
        _compare([folder, *map(open_run, compare)], path, as_json)
        if open_:
            _open(path)
        return
    result = write_report(folder, out)
    if as_json:
        print_json(
            {
                "path": str(result.path),
                "audit": {
                    "recorded": result.audit.recorded,
                    "ok": result.audit.ok,
                    "sentence": result.audit.sentence(),
                    "problems": result.audit.problems(),
                    "unrecorded": result.audit.unrecorded,
                    "skipped": result.audit.skipped,
                },
                **result.summary.as_json(),
            }
        )
    else:
        rows = _report_rows(result.summary, result.audit)
        print_rows([*rows, ("report", str(result.path))])
    if open_:
        _open(result.path)


def _report_cluster(name: str | None, out: Path | None, *, as_json: bool) -> Path:
    from hvd_elastic.views.cluster_page import write_cluster_report

    path, summary = write_cluster_report(name, out)
    if as_json:
        print_json({"path": str(path), **summary.as_json()})
        return path
    ended = [job for job in summary.jobs.values() if job.ended_s is not None]
    waits_s = [job.wait_s(summary.duration_s) for job in summary.jobs.values()]
    took_s = [job.ended_s - job.submitted_s for job in ended if job.ended_s is not None]
    rows = [
        (
            "cluster",
            f"{summary.name}: {count(len(summary.hosts), 'host')}, {count(summary.slots, 'slot')}",
        ),
        ("jobs", f"{len(summary.jobs)}, {len(ended)} of them over"),
        ("wait", f"{duration_words(sum(waits_s) / len(waits_s))} in the mean"),
    ]
    if took_s:
        mean_s = sum(took_s) / len(took_s)
        rows.append(("completion", f"{duration_words(mean_s)} in the mean"))
    print_rows([*rows, ("report", str(path))])
    return path


def _compare(folders: list[RunFolder], path: Path, as_json: bool) -> None:
    from hvd_elastic.views.comparison import write_comparison

    found = write_comparison(folders, path)
    if as_json:
        print_json({"path": str(path), "runs": [summary.as_json() for summary in found]})
        return
    for summary in found:
        outcome = _outcome(summary, summary.status)
        print(f"{summary.run_id}: {outcome}, {duration_words(summary.duration_s)}")
    print(f"report: {path}")


def _outcome(summary: RunSummary, state: str) -> str:
    steps, examples = None if summary.plain else summary.steps, summary.examples
    return outcome_words(state, steps, examples, summary.message, exact=summary.exact)


def _open(path: Path) -> None:
    if not webbrowser.open(path.resolve().as_uri()):
        print(f"no browser found here; open {path} yourself", file=sys.stderr)


def _report_rows(summary: RunSummary, audit: AuditResult) -> list[tuple[str, str]]:
    """Return the rows of a report: label and text."""
    state = run_state(summary.status, alive=True, waiting=bool(summary.waiting))
    rows = [
        ("run", f"{summary.run_id}: {_outcome(summary, state)}"),
        ("took", duration_words(summary.duration_s)),
    ]
    metrics = summary.final_metrics()
    if metrics:
        rows.append(("metrics", metric_words(metrics)))
    left_out = left_out_words(summary.last)
    if left_out:
        rows.append(("left out", left_out))
    if summary.skipped:
        rows.append(("skipped", skipped_words(summary.skipped)))
    if not summary.plain:
        rows.append(("rescales", rescale_words(summary)))
    if summary.input:
        rows.append(("data", summary.input))
    if summary.saved:
        rows.append(("saved", saved_words(summary)))
    if audit.recorded:
        rows.append(("examples", audit.sentence()))
    return rows
