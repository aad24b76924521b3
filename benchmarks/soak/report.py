"""The result of a soak, as a table, as JSON and as a page of Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.soak.growth import Growth
from benchmarks.soak.player import Incident
from benchmarks.soak.schedule import KINDS
from benchmarks.testbed.figures import Conditions


@dataclass
class SoakResult:
    """Result of a soak.

    Attributes:
        seed: seed of the schedule.
        options: further options needed to repeat the soak.
        conditions: machine and load.
        began: start of the soak [s, monotonic].
        seconds: duration of the soak.
        incidents: faults in order.
        checks: name of a final check → its result.
        problems: problems that belong to no single fault.
        growths: growth of the processes that lived long enough.
        interrupted: whether Ctrl-C ended it, so that some checks are missing.
        kept: folder with the run's records if something was wrong; else empty.
    """

    seed: int
    options: dict[str, Any]
    conditions: Conditions
    began: float
    seconds: float
    incidents: list[Incident]
    checks: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    interrupted: bool = False
    kept: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong and everything was checked."""
        faults = any(incident.problems for incident in self.incidents)
        return not faults and not self.problems and not self.interrupted

    def verdict(self) -> str:
        """Return the verdict as one line."""
        bad = sum(bool(incident.problems) for incident in self.incidents) + len(self.problems)
        found = f"{bad} problem{'' if bad == 1 else 's'}"
        if self.interrupted:
            return f"interrupted after {len(self.incidents)} faults, {found} until then"
        if bad:
            return f"FAILED: {found} in {len(self.incidents)} faults"
        return f"passed: {len(self.incidents)} faults, none left a trace"

    def as_json(self) -> dict[str, Any]:
        """Return the body of the result file."""
        return {
            "verdict": self.verdict(),
            "ok": self.ok,
            "seed": self.seed,
            "options": self.options,
            "seconds": round(self.seconds, 1),
            "kinds": rows_by_kind(self.incidents),
            "checks": self.checks,
            "problems": self.problems,
            "faults": [incident.as_json(self.began) for incident in self.incidents],
            "growth": [asdict(growth) for growth in self.growths],
        }


def rows_by_kind(incidents: Sequence[Incident]) -> list[dict[str, Any]]:
    """Return one row for each kind of fault that was caused, in the order of the kinds.

    ``stall`` is the longest time without a step, ``recovery`` the time from the end of the fault to
    training in every slot; ``dealt_with`` counts how often that was reached, ``problems`` the
    faults with problems.
    """
    rows = []
    for kind in KINDS:
        made = [incident for incident in incidents if incident.fault.kind == kind]
        if not made:
            continue
        row: dict[str, Any] = {"kind": kind, "times": len(made)}
        row["dealt_with"] = sum(incident.recovered is not None for incident in made)
        for name in ("stall", "recovery"):
            taken = [s for i in made if (s := getattr(i, f"{name}_s")) is not None]
            row[f"{name}_median_s"] = round(statistics.median(taken), 3) if taken else None
            row[f"{name}_max_s"] = round(max(taken), 3) if taken else None
        row["problems"] = sum(bool(incident.problems) for incident in made)
        rows.append(row)
    return rows


_HEADINGS = (
    *("fault", "times", "dealt with", "no step for, median", "max [s]"),
    *("all there after, median", "max [s]", "problems"),
)


def _cell(name: str, value: Any) -> str:
    if name.endswith("_s"):
        return "-" if value is None else f"{value:.2f}"
    return str(value or "") if name == "problems" else str(value)


def show_soak(result: SoakResult, console: Console) -> None:
    """Print the result to a terminal."""
    console.print(Markdown(_page(result)))
    if result.kept:
        console.print(f"records of the run: {result.kept}", highlight=False)


def write_soak(result: SoakResult, path: Path) -> Path:
    """Write the result as JSON, and as Markdown beside it; return the path of the latter."""
    content = {"benchmark": "soak", "conditions": asdict(result.conditions), **result.as_json()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".md")
    page.write_text(_page(result), encoding="utf-8")
    return page


def _page(result: SoakResult) -> str:
    options = " ".join(f"{name}={json.dumps(value)}" for name, value in result.options.items())
    kinds = rows_by_kind(result.incidents)
    rows = [[_cell(*entry) for entry in row.items()] for row in kinds]
    problems = [
        f"{incident.fault.text()} ({incident.made.what}): {problem}"
        for incident in result.incidents
        for problem in incident.problems
    ]
    problems += result.problems
    lines = [
        f"# Soak, seed {result.seed}",
        "",
        f"**{result.verdict()}**",
        "",
        f"Taken {result.conditions.when}, {result.seconds:.0f} s. {result.conditions.sentence()}",
        "",
        f"Options: `{options}`",
        "",
        f"| {' | '.join(_HEADINGS)} |",
        f"|{'---|' * len(_HEADINGS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        *("", "## At the end", "", "| check | |", "|---|---|"),
        *(f"| {name} | {_one_line(said)} |" for name, said in result.checks.items()),
        *(["", "## Problems", ""] if problems else []),
        *(f"- {_one_line(problem)}" for problem in problems),
        *("", "## Kinds", ""),
        *(f"- `{row['kind']}`: {KINDS[row['kind']].meaning}" for row in kinds),
    ]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
