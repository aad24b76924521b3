"""Builds the table and the result file from single observations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from benchmarks.elasticity.breakdown import Breakdown
from benchmarks.elasticity.fit import StallModel, fit_stall
from benchmarks.elasticity.ratio import KILL_EVERY_S, TrainingRatio
from benchmarks.elasticity.rows import Case, Row
from benchmarks.testbed.figures import Conditions, Figure, Result, figure, table

PREDICTED = (64, 256, 1024)
"""World sizes for which the stall is predicted."""
_GROWTH = re.compile(r"(join|kill) (\d+)")
_TITLE = (
    "Elasticity, median (range); times are how long training stands still where nothing else is "
    "said"
)


@dataclass(frozen=True)
class Observation:
    """One figure from one play, or the reason why it is missing.

    Attributes:
        row: number of the row.
        launcher: key of the job's launcher.
        case: name of the figure.
        value: figure in the case's unit; None if it is missing.
        why_none: short reason for the table.
        detail: long reason, such as the last lines of output.
    """

    row: int
    launcher: str
    case: str
    value: float | None = None
    why_none: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Cell:
    """All figures of one launcher in one case, and a short reason for each missing one."""

    taken: Figure
    failures: tuple[str, ...] = ()

    def text(self, unit: str) -> str:
        """Return median and range as text, with the failures.

        >>> cell_of([Observation(1, "ours", "stall", 0.25), Observation(1, "ours", "stall", 0.2)]
        ... ).text("s")
        '0.225 s (0.200 to 0.250)'
        """
        parts = [self.taken.text(unit)] if self.taken.samples_s else []
        for reason in dict.fromkeys(self.failures):
            times = self.failures.count(reason)
            alone = times == 1 and not self.taken.samples_s
            parts.append(reason if alone else f"{times} times: {reason}")
        return "; ".join(parts) or "-"

    def meets(self, target: float) -> bool:
        """Return whether the median is not above the target."""
        return self.taken.median_s is not None and self.taken.median_s <= target

    def as_json(self) -> dict[str, Any]:
        """Return the cell as plain data for the result file."""
        values = (*vars(self.taken).values(), self.failures)
        return dict(zip(("median", "low", "high", "samples", "failures"), values, strict=True))


def cell_of(observations: Iterable[Observation]) -> Cell:
    """Combine the observations of one launcher and one case."""
    seen = list(observations)
    taken = figure([entry.value for entry in seen if entry.value is not None])
    return Cell(taken, tuple(entry.why_none for entry in seen if entry.value is None))


def fits_of(observations: Iterable[Observation]) -> dict[str, dict[str, StallModel]]:
    """Fit the growth of the stall; return launcher → ``join`` or ``kill`` → model."""
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


def elasticity_result(
    taken: Conditions,
    repetitions: int,
    rows: Sequence[Row],
    observations: Sequence[Observation],
    names: Mapping[str, str],
    missing: Mapping[str, str],
    ratios: Sequence[TrainingRatio] = (),
    parts: Sequence[Breakdown] = (),
) -> Result:
    """Return the result with its tables.

    Args:
        taken: conditions of the measurement.
        repetitions: number of plays of each row.
        rows: rows that were played.
        observations: observations of all rows.
        names: launcher's key → its name, in the order of the columns.
        missing: launcher's key → why it was not measured at all.
        ratios: effective training times.
        parts: breakdowns of our own stall.
    """
    lines, told = [], []
    for row in rows:
        cases = []
        for case in row.cases:
            cells = {
                key: cell_of(
                    entry
                    for entry in observations
                    if (entry.row, entry.case, entry.launcher) == (row.number, case.name, key)
                )
                for key in names
            }
            title = row.title if len(row.cases) == 1 else f"{row.title}: {case.name}"
            shown = [_shown(row, key, case, cell, missing) for key, cell in cells.items()]
            lines.append([str(row.number), title, _target(case, cells.get("ours")), *shown])
            plain: dict[str, Any] = {"case": case.name, "unit": case.unit, "target": case.target}
            if case.target is not None and "ours" in cells:
                plain["target_met"] = cells["ours"].meets(case.target)
            for key, cell in cells.items():
                why = missing.get(key) or row.without.get(key)
                plain[key] = {"not_measured": why} if why else cell.as_json()
            cases.append(plain)
        told.append({"row": row.number, "title": row.title, "cases": cases})
    fits = fits_of(observations)
    body = {
        "repetitions": repetitions,
        "launchers": dict(names),
        "missing": dict(missing),
        "rows": told,
        "fits": {
            key: {what: _fit_as_json(model) for what, model in models.items()}
            for key, models in fits.items()
        },
        "failures": [
            {name: getattr(entry, name) for name in ("row", "launcher", "case", "detail")}
            for entry in observations
            if entry.detail
        ],
        "breakdown": parts,
        "effective_training_time": [
            {"kill_every_s": KILL_EVERY_S, **asdict(ratio)} for ratio in ratios
        ],
    }
    launchers = [f"{n}\n[dim]({k})[/dim]" if k in missing else n for k, n in names.items()]
    headings = ("#", "what happens", "target", *launchers)
    tables: list[Any] = [table(_TITLE, headings, lines, show_lines=True)] if rows else []
    if fits and rows:
        tables.append(_fit_table(fits, names))
    tables += [part.table() for part in parts]
    tables += [ratio.sentence(names) for ratio in ratios]
    return Result("elasticity", taken, body, tables)


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
    if ours is None:
        return text
    return f"{text}: {'met' if ours.meets(case.target) else 'missed'}"


def _fit_table(fits: Mapping[str, Mapping[str, StallModel]], names: Mapping[str, str]) -> Table:
    headings = ("launcher", "event", "model (error)", *(f"n = {n}" for n in PREDICTED))
    rows = [
        [
            *(names[key], what, f"{model} (± {model.error_s:.3f} s)"),
            *(f"{model.predict(n):.2f} s, mostly {model.dominant(n)}" for n in PREDICTED),
        ]
        for key, models in fits.items()
        for what, model in models.items()
    ]
    return table("How the stall grows with n ranks, and where to", headings, rows)


def _fit_as_json(model: StallModel) -> dict[str, Any]:
    return {
        **asdict(model),
        "predicted_s": {n: round(model.predict(n), 4) for n in PREDICTED},
        "dominant": {n: model.dominant(n) for n in PREDICTED},
    }
