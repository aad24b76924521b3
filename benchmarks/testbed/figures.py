"""Results of a benchmark: figures, the conditions of the measurement, and the result files."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.table import Table

from hvd_elastic.errors import UsageError
from hvd_elastic.programs.usable import usable_cores

SINGLE_MEASUREMENTS = frozenset(
    ("samples", "samples_s", "trainings", "curve", "batches", "observations", "statics", "failures")
)
"""Fields that are only in the raw file of a result and not in its summary."""
_LINE = 240
"""Length of a line of a summary, in characters."""


@dataclass(frozen=True)
class Figure:
    """Repeated measurements of one duration.

    Attributes:
        median_s, min_s, max_s: median and range of the samples [s]; None if there are none.
        samples_s: samples in the order in which they were taken [s].
    """

    median_s: float | None
    min_s: float | None
    max_s: float | None
    samples_s: tuple[float, ...]

    def __str__(self) -> str:
        return self.text("s")

    def text(self, unit: str) -> str:
        """Return median and range; ``unit`` is ``s``, ``x`` (a ratio) or ``""`` (a count)."""
        if self.median_s is None:
            return "-"
        digits = 0 if not unit else 1 if self.median_s >= 100 else 2 if self.median_s >= 1 else 3
        text = f"{self.median_s:.{digits}f}{' ' if unit == 's' else ''}{unit}"
        if len(self.samples_s) > 1:
            text += f" ({self.min_s:.{digits}f} to {self.max_s:.{digits}f})"
        return text


def figure(samples: Sequence[float]) -> Figure:
    """Return the figure of some samples [s].

    >>> str(figure([2.0, 1.5, 4.0]))
    '2.00 s (1.50 to 4.00)'
    >>> str(figure([]))
    '-'
    """
    rounded = tuple(round(sample, 4) for sample in samples)
    if not rounded:
        return Figure(None, None, None, ())
    return Figure(round(statistics.median(rounded), 4), min(rounded), max(rounded), rounded)


def ratio(other: Figure, ours: Figure) -> float | None:
    """Return the ratio of the other's median to ours, or None.

    >>> ratio(figure([6.0]), figure([3.0]))
    2.0
    """
    if not other.median_s or not ours.median_s:
        return None
    return round(other.median_s / ours.median_s, 2)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and range as fields of a row.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'lowest': 1.0, 'highest': 3.0}
    """
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


@dataclass(frozen=True)
class Conditions:
    """Conditions of a measurement: machine, load and versions.

    Attributes:
        when: time of the measurement, UTC.
        cores: number of cores that these processes may use.
        processor: model of the processor.
        load_before: load averages of the machine (1, 5, 15 minutes) at the start.
        load_after: 1-minute load average at the end, which includes the benchmark itself.
        versions: versions of Python, the kernel and the relevant packages.
        hosts: description of the virtual hosts.
        note: further remarks needed to read the figures.
    """

    when: str
    cores: int
    processor: str
    load_before: tuple[float, float, float]
    load_after: float
    versions: dict[str, str]
    hosts: str
    note: str

    def sentence(self) -> str:
        """Return the conditions as text for below a table."""
        one, five, _ = self.load_before
        return (
            f"{self.cores} cores of one machine ({self.processor}), {self.hosts}; load average "
            f"before: {one:.2f} (1 min), {five:.2f} (5 min), after: {self.load_after:.2f}. "
            f"{self.note}"
        )


def conditions(
    hosts: str,
    note: str,
    load_before: tuple[float, float, float],
    more_versions: Mapping[str, str] | None = None,
) -> Conditions:
    """Return the conditions of a benchmark that ends now."""
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("hvd-elastic", "horovod", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions |= more_versions or {}
    return Conditions(
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cores=usable_cores(),
        processor=processor_model(Path("/proc/cpuinfo")),
        load_before=load_before,
        load_after=os.getloadavg()[0],
        versions=versions,
        hosts=hosts,
        note=note,
    )


def processor_model(cpuinfo: Path) -> str:
    """Return the processor's model name from the kernel, or its architecture if there is none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


@dataclass(frozen=True)
class Result:
    """Result of one call of a benchmark.

    Attributes:
        benchmark: name of the benchmark, with which the names of its files begin.
        conditions: conditions of the measurement.
        body: figures; dataclasses are written as their fields.
        shown: texts and rich tables for the terminal; if empty, the rows of the body are shown.
    """

    benchmark: str
    conditions: Conditions
    body: Mapping[str, Any]
    shown: Sequence[Any] = ()

    def show(self, console: Any) -> None:
        """Print the figures, and the conditions below them."""
        for each in self.shown or [text_table(self.body)]:
            console.print(each, highlight=False, markup=False, soft_wrap=isinstance(each, str))
        console.print(self.conditions.sentence(), style="dim")

    def as_json(self) -> dict[str, Any]:
        """Return the whole result as plain data."""
        whole = {"benchmark": self.benchmark, "conditions": self.conditions, **self.body}
        return dict(plain(whole))

    def write(self, path: Path) -> None:
        """Write the summary to ``path``, and the whole result to a ``.raw.json`` beside it."""
        write_result(path, self.as_json())


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], **options: Any
) -> Table:
    """Return a rich table with a left-aligned title."""
    made = Table(*headings, title=title, title_justify="left", **options)
    for row in rows:
        made.add_row(*row)
    return made


def text_table(parts: Mapping[str, Any]) -> str:
    """Return the rows of each part as columns of text.

    >>> print(text_table({"steady": [{"slots": 8, "share": 0.98765}, {"slots": 12}]}))
    steady
      slots  share
      8      0.9877
      12     -
    """
    texts = []
    for title, rows in parts.items():
        if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
            continue
        names = [*dict.fromkeys(n for row in rows for n in row if n not in SINGLE_MEASUREMENTS)]
        cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
        widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        texts.append("\n".join([title, *(f"  {line.rstrip()}" for line in lines)]))
    return "\n\n".join(texts)


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None or isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: dataclasses as fields, numbers not finite as None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(value: Any) -> Any:
    """Return plain data without single measurements, and with four digits for each number.

    >>> summary({"rows": [{"median": 0.123456, "samples": [0.1, 0.123456]}], "bytes": 123456})
    {'rows': [{'median': 0.1235}], 'bytes': 123456}
    """
    if isinstance(value, dict):
        kept = {name: summary(e) for name, e in value.items() if name not in SINGLE_MEASUREMENTS}
        # Empty values are left out to keep rows short.
        return {name: each for name, each in kept.items() if each not in ({}, [], "")}
    if isinstance(value, list):
        return _table([summary(each) for each in value])
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _table(rows: list[Any]) -> Any:
    """Return rows of single values or lists as one table of fields and rows, if possible."""
    if len(rows) < 3 or not all(isinstance(row, dict) for row in rows):
        return rows
    cells = [each for row in rows for cell in row.values() for each in _elements(cell)]
    if any(isinstance(each, dict | list) for each in cells):
        return rows
    fields = [*dict.fromkeys(field for row in rows for field in row)]
    return {"fields": fields, "rows": [[row.get(field) for field in fields] for row in rows]}


def _elements(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [cell]


def rows_of(summarised: Any) -> list[dict[str, Any]]:
    """Return the rows of a summarised list; missing fields are None.

    >>> rows_of(summary([{"a": 1, "b": 2.0}, {"a": 3}, {"a": 5, "b": 6.0}]))[1]
    {'a': 3, 'b': None}
    """
    if isinstance(summarised, dict):
        fields = summarised["fields"]
        return [dict(zip(fields, row, strict=True)) for row in summarised["rows"]]
    return list(summarised)


def kept_rows(
    out: Path | None, benchmark: str, parts: Iterable[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of earlier calls in a summary, by part; none if the file is not there.

    Raises:
        UsageError: the file cannot be read, or has the figures of another benchmark.
    """
    if out is None or not out.exists():
        return {part: [] for part in parts}
    try:
        content = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {out} is there and cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("benchmark") != benchmark:
        raise UsageError(
            f"--out {out} holds something else than figures of this benchmark ({benchmark}). "
            "Name another file"
        )
    return {part: rows_of(content.get(part, [])) for part in parts}


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Write the summary of a result, and the whole result to a ``.raw.json`` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(content, indent=1)
    path.with_suffix(".raw.json").write_text(raw + "\n", encoding="utf-8")
    path.write_text(_lines_of(summary(dict(content))) + "\n", encoding="utf-8")


def _lines_of(value: Any, indent: int = 0) -> str:
    """Return indented JSON in which everything that fits into a line is on one line."""
    short = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or indent + len(short) <= _LINE:
        return short
    if isinstance(value, dict):
        begin, end = "{}"
        parts = [f"{json.dumps(key)}: {_lines_of(each, indent + 1)}" for key, each in value.items()]
    else:
        begin, end = "[]"
        parts = [_lines_of(each, indent + 1) for each in value]
    inner = ",\n".join(" " * (indent + 1) + part for part in parts)
    return f"{begin}\n{inner}\n{' ' * indent}{end}"
