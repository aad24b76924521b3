"""Figures of runs in the text format of Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hvd_elastic.records.summary import RunSummary

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIGURES = {
    "slots": ("gauge", "Processes that train now."),
    "steps_total": ("counter", "Steps of training."),
    "examples_total": ("counter", "Examples that training has used."),
    "rescales_total": ("counter", "Changes of the set of processes since the start."),
    "rescale_pause_seconds_total": ("counter", "Time that training paused for them."),
    "warnings_total": ("counter", "Warnings."),
    "throughput_examples_per_second": ("gauge", "Examples per second over all processes."),
    "goodput_examples_per_second": ("gauge", "Throughput times statistical efficiency."),
    "efficiency_ratio": ("gauge", "Statistical efficiency of the batch."),
    "noise_scale_examples": ("gauge", "Gradient noise scale."),
    "batch_size_examples": ("gauge", "Global batch size."),
    "learning_rate": ("gauge", "Learning rate of the first parameter group."),
    "data_wait_ratio": ("gauge", "Part of the time that rank 0 waits for data."),
    "rank_wait_ratio": ("gauge", "Part of the time that rank 0 waits for other ranks."),
    "done_ratio": ("gauge", "Part of the training that is done."),
    "loss": ("gauge", "Loss that the script has committed last."),
    "last_event_timestamp_seconds": ("gauge", "Time of the last event."),
}
"""Type and description of each figure, whose names begin with ``hvd_elastic_``."""
HOST_FIGURES = {
    "host_cpu_ratio": ("cpu", "Part of all cores of a host in use."),
    "host_memory_ratio": ("memory", "Part of the memory of a host in use."),
    "host_sent_bytes_per_second": ("sent", "Sent over the interface of the ring."),
    "host_received_bytes_per_second": ("received", "Received over the interface of the ring."),
    "host_read_bytes_per_second": ("read", "Read from disks."),
    "host_written_bytes_per_second": ("written", "Written to disks."),
    "host_step_seconds": ("step_s", "Compute time of a step, mean of the processes of a host."),
}
"""Field of ``host_sample`` events, and description, of each gauge of a host."""
_LAST = {
    "throughput_examples_per_second": "throughput",
    "goodput_examples_per_second": "goodput",
    "efficiency_ratio": "efficiency",
    "noise_scale_examples": "noise_scale",
    "batch_size_examples": "global_batch_size",
    "learning_rate": "lr",
    "data_wait_ratio": "data_wait",
    "rank_wait_ratio": "rank_wait",
    "done_ratio": "done",
    "loss": "loss",
}
"""Metric of ``metrics`` events by figure."""


def prometheus_text(runs: Iterable[tuple[RunSummary, str]]) -> str:
    """Return the figures of runs, each with its state; a figure that is not known is left out."""
    known = [(summary, state, _figures(summary)) for summary, state in runs]
    lines = ["# HELP hvd_elastic_run_info State of a run.", "# TYPE hvd_elastic_run_info gauge"]
    lines += [
        f'hvd_elastic_run_info{{run="{summary.run_id}",state="{state}"}} 1'
        for summary, state, _ in known
    ]
    for name, (kind, described) in FIGURES.items():
        rows = [
            f'hvd_elastic_{name}{{run="{summary.run_id}"}} {figures[name]!r}'
            for summary, _, figures in known
            if name in figures
        ]
        if rows:
            lines += [f"# HELP hvd_elastic_{name} {described}", f"# TYPE hvd_elastic_{name} {kind}"]
            lines += rows
    for name, (figure, described) in HOST_FIGURES.items():
        rows = [
            f'hvd_elastic_{name}{{run="{summary.run_id}",host="{_quoted(host)}"}} '
            f"{use.figures[figure]!r}"
            for summary, _, _ in known
            for host, use in summary.present_use.items()
            if figure in use.figures
        ]
        if rows:
            lines += [f"# HELP hvd_elastic_{name} {described}", f"# TYPE hvd_elastic_{name} gauge"]
            lines += rows
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _figures(summary: RunSummary) -> dict[str, float]:
    found: dict[str, float] = {
        "slots": summary.size,
        "steps_total": summary.steps,
        "examples_total": summary.examples,
        "rescales_total": len(summary.live_rescales),
        "rescale_pause_seconds_total": sum(r.pause_s or 0.0 for r in summary.live_rescales),
        "warnings_total": len(summary.warnings),
    }
    for name, metric in _LAST.items():
        value = summary.last.get(metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            found[name] = value
    if summary.ended is not None:
        found["last_event_timestamp_seconds"] = summary.ended
    return found
