"""From single observations to the table and the kept file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.elasticity.fit import StallModel, fit_stall
from benchmarks.elasticity.rows import Case, Row
from benchmarks.testbed.figures import figure

__all__ = [
    "PREDICTED",
    "Cell",
    "Observation",
    "as_json",
    "cell_of",
    "elasticity_tables",
    "fits_of",
]

PREDICTED = (64, 256, 1024)
"""World sizes for which the stall is foretold."""
_GROWTH = re.compile(r"(join|kill) (\d+)")


@dataclass(frozen=True)
class Observation:
    """What one play gave, or that it did not.

    Attributes:
        row: its number.
        launcher: key of who led the job.
        case: name of the figure.
        value: in the case's unit; None when there is none.
        why_none: in a few words, for the table.
        detail: more of it, such as the last lines of output.
    """

    row: int
    launcher: str
    case: str
    value: float | None = None
    why_none: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Cell:
    """All of one launcher's figures of one case.

    Attributes:
        median, low, high: None when nothing was measured.
        samples: in the order they were taken.
        failures: short reasons, one for each play without a figure.
    """

    median: float | None
    low: float | None
    high: float | None
    samples: tuple[float, ...]
    failures: tuple[str, ...] = ()

    def text(self, unit: str) -> str:
        """Median and range, and what failed.

        >>> cell_of([Observation(1, "ours", "stall", 0.25), Observation(1, "ours", "stall", 0.2)]
        ... ).text("s")
        '0.225 s (0.200 to 0.250)'
        """
        parts = []
        if self.median is not None and self.low is not None and self.high is not None:
            digits = 0 if not unit else 1 if self.median >= 100 else 2 if self.median >= 1 else 3
            shown = f"{self.median:.{digits}f}{' ' if unit == 's' else ''}{unit}"
            if len(self.samples) > 1:
                shown += f" ({self.low:.{digits}f} to {self.high:.{digits}f})"
            parts.append(shown)
        for reason in dict.fromkeys(self.failures):
            times = self.failures.count(reason)
            whole = times == 1 and self.median is None
            parts.append(reason if whole else f"{times} times: {reason}")
        return "; ".join(parts) or "-"


def cell_of(observations: Iterable[Observation]) -> Cell:
    """Observations of one launcher and one case put together."""
    seen = list(observations)
    taken = figure([entry.value for entry in seen if entry.value is not None])
    failures = tuple(entry.why_none for entry in seen if entry.value is None)
    return Cell(taken.median_s, taken.min_s, taken.max_s, taken.samples_s, failures)


def _cells(
    row: Row, case: Case, observations: Sequence[Observation], launchers: Iterable[str]
) -> dict[str, Cell]:
    return {
        key: cell_of(
            entry
            for entry in observations
            if (entry.row, entry.case, entry.launcher) == (row.number, case.name, key)
        )
        for key in launchers
    }


def verdict(cell: Cell, target: float | None) -> str:
    """Whether the target is met by the median: yes, no, or nothing to say.

    >>> verdict(Cell(0.2, 0.2, 0.2, (0.2,)), 0.25)
    'met'
    """
    if target is None:
        return ""
    return "met" if cell.median is not None and cell.median <= target else "missed"


def fits_of(observations: Iterable[Observation]) -> dict[str, dict[str, StallModel]]:
    """Launcher → ``join`` or ``kill`` → how the stall grows, from the rows that vary the size."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for entry in observations:
        found = _GROWTH.fullmatch(entry.case)
        if found and entry.value is not None:
            key = (entry.launcher, found[1])
            points.setdefault(key, []).append((int(found[2]), entry.value))
    fits: dict[str, dict[str, StallModel]] = {}
    for (launcher, what), measured in sorted(points.items()):
        model = fit_stall(*zip(*measured, strict=True))
        if model is not None:
            fits.setdefault(launcher, {})[what] = model
    return fits


def elasticity_tables(
    rows: Sequence[Row],
    observations: Sequence[Observation],
    names: Mapping[str, str],
    missing: Mapping[str, str],
) -> list[Any]:
    """The tables, for rich.

    Args:
        rows: those that were played.
        observations: of all of them.
        names: launcher's key → its name, in the order of the columns.
        missing: launcher's key → why it was not measured at all.
    """
    from rich.table import Table

    table = Table(
        title="Elasticity, median (range); times are how long training stands still where nothing "
        "else is said",
        title_justify="left",
        show_lines=True,
    )
    table.add_column("#")
    table.add_column("what happens")
    table.add_column("target")
    for key, name in names.items():
        table.add_column(f"{name}\n[dim]({key})[/dim]" if key in missing else name)
    for row in rows:
        for case in row.cases:
            cells = _cells(row, case, observations, names)
            title = row.title if len(row.cases) == 1 else f"{row.title}: {case.name}"
            shown = [_shown(row, key, case, cell, missing) for key, cell in cells.items()]
            table.add_row(str(row.number), title, _target(case, cells.get("ours")), *shown)
    tables: list[Any] = [table]
    fits = fits_of(observations)
    if fits:
        tables.append(_fit_table(fits, names))
    return tables


def _shown(row: Row, key: str, case: Case, cell: Cell, missing: Mapping[str, str]) -> str:
    if key in missing:
        return f"not measured: {missing[key]}"
    if key in row.without:
        return f"not asked: it {row.without[key]}"
    return cell.text(case.unit)


def _target(case: Case, ours: Cell | None) -> str:
    if case.target is None:
        return ""
    text = f"≤ {case.target:g}{' ' if case.unit == 's' else ''}{case.unit}"
    return text if ours is None else f"{text}: {verdict(ours, case.target)}"


def _fit_table(fits: Mapping[str, Mapping[str, StallModel]], names: Mapping[str, str]) -> Any:
    from rich.table import Table

    table = Table(title="How the stall grows with n ranks, and where to", title_justify="left")
    for heading in ("launcher", "event", "model (error)", *(f"n = {n}" for n in PREDICTED)):
        table.add_column(heading)
    for key, models in fits.items():
        for what, model in models.items():
            told = [f"{model.predict(n):.2f} s, mostly {model.dominant(n)}" for n in PREDICTED]
            table.add_row(names[key], what, f"{model} (± {model.error_s:.3f} s)", *told)
    return table


def as_json(
    rows: Sequence[Row],
    observations: Sequence[Observation],
    names: Mapping[str, str],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """The body of the kept file."""
    told = []
    for row in rows:
        cases = []
        for case in row.cases:
            cells = _cells(row, case, observations, names)
            plain: dict[str, Any] = {"case": case.name, "unit": case.unit, "target": case.target}
            if case.target is not None and "ours" in cells:
                plain["target_met"] = verdict(cells["ours"], case.target) == "met"
            for key, cell in cells.items():
                if key in missing or key in row.without:
                    plain[key] = {"not_measured": missing.get(key) or row.without[key]}
                else:
                    plain[key] = asdict(cell)
            cases.append(plain)
        told.append({"row": row.number, "title": row.title, "cases": cases})
    fits = {
        key: {
            what: {
                **asdict(model),
                "predicted_s": {n: round(model.predict(n), 4) for n in PREDICTED},
                "dominant": {n: model.dominant(n) for n in PREDICTED},
            }
            for what, model in models.items()
        }
        for key, models in fits_of(observations).items()
    }
    details = [
        {"row": entry.row, "launcher": entry.launcher, "case": entry.case, "detail": entry.detail}
        for entry in observations
        if entry.detail
    ]
    return {
        "launchers": dict(names),
        "missing": dict(missing),
        "rows": told,
        "fits": fits,
        "failures": details,
    }
