"""Figures of runs in the text format of Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hvd_elastic.records.summary import RunSummary
from hvd_elastic.records.wording import READING

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIGURES = {
    "slots": ("gauge", "Processes that train now."),
    "steps_total": ("counter", "Steps of training."),
    "examples_total": ("counter", "Examples that training has used."),
    "rescales_total": ("counter", "Changes of the set of workers since the start."),
    "rescale_pause_seconds_total": ("counter", "Time that training paused for them."),
    "warnings_total": ("counter", "Warnings."),
    "throughput_examples_per_second": ("gauge", "Examples per second over all workers."),
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
    "host_step_seconds": ("step_s", "Compute time of a step, mean of the workers of a host."),
}
"""Field of ``host_sample`` events, and description, of each gauge of a host."""
GPU_FIGURES = {
    "host_gpu_ratio": "Part of the time that a GPU of a host computed.",
    "host_gpu_memory_ratio": "Part of the memory of a GPU in use.",
}
"""Description of each gauge of a GPU, in the order of :attr:`HostUse.gpus`."""
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
_RATES = {"throughput", "goodput", "data_wait", "rank_wait"}
"""Metrics that say how fast a run trains now: there is none while no process trains."""


def prometheus_text(runs: Iterable[tuple[RunSummary, str]]) -> str:
    """Return the figures of runs, each with its state; a figure that is not known is left out.

    Of a run whose events are still being read, all figures would be those of an earlier time.
    """
    known = [
        (summary, state, {} if state == READING else _figures(summary, state))
        for summary, state in runs
    ]
    info = [({"run": summary.run_id, "state": state}, 1) for summary, state, _ in known]
    lines = _lines("run_info", "gauge", "State of a run.", info)
    for name, (kind, described) in FIGURES.items():
        rows = [
            ({"run": summary.run_id}, found[name]) for summary, _, found in known if name in found
        ]
        lines += _lines(name, kind, described, rows)
    used = [
        ({"run": summary.run_id, "host": host}, use)
        for summary, state, _ in known
        for host, use in summary.present_use(state).items()
    ]
    for name, (figure, described) in HOST_FIGURES.items():
        rows = [(labels, use.figures[figure]) for labels, use in used if figure in use.figures]
        lines += _lines(name, "gauge", described, rows)
    for place, (name, described) in enumerate(GPU_FIGURES.items()):
        rows = [
            (labels | {"gpu": str(index)}, gpu[place])
            for labels, use in used
            for index, gpu in enumerate(use.gpus)
        ]
        lines += _lines(name, "gauge", described, rows)
    return "".join(f"{line}\n" for line in lines)


def _lines(
    name: str, kind: str, described: str, rows: Sequence[tuple[Mapping[str, str], float]]
) -> list[str]:
    """Return the lines of a figure with its labels and values; none without values."""
    if not rows:
        return []
    name = f"hvd_elastic_{name}"
    lines = [f"# HELP {name} {described}", f"# TYPE {name} {kind}"]
    for labels, value in rows:
        told = ",".join(f'{label}="{_quoted(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{told}}} {value!r}")
    return lines


def _quoted(text: str) -> str:
    """Return the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _figures(summary: RunSummary, state: str) -> dict[str, float]:
    size = summary.trains_now(state)
    found: dict[str, float] = {"slots": size}
    if summary.ended is not None:
        found["last_event_timestamp_seconds"] = summary.ended
    if summary.plain:
        return found
    found |= {
        "steps_total": summary.steps,
        "examples_total": summary.examples,
        "rescales_total": len(summary.live_rescales),
        "rescale_pause_seconds_total": sum(r.pause_s or 0.0 for r in summary.live_rescales),
        "warnings_total": len(summary.warnings),
    }
    for name, metric in _LAST.items():
        value = summary.last.get(metric)
        if metric in _RATES and not size:
            continue
        if isinstance(value, (int, float)) and math.isfinite(value):
            found[name] = value
    return found
