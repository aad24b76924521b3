"""What came of a soak: its verdict, as a table, as JSON and as a page of Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.soak.growth import Growth
from benchmarks.soak.player import Incident
from benchmarks.soak.schedule import KINDS
from benchmarks.testbed.figures import Conditions

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Row", "SoakResult", "rows_by_kind", "show_soak", "write_soak"]


@dataclass(frozen=True)
class Row:
    """All faults of one kind.

    Attributes:
        kind: its name.
        times: how often it was made.
        dealt_with: how often training went on in every slot.
        stall_median_s, stall_max_s: longest time without a step.
        recovery_median_s, recovery_max_s: from the end of the fault to training in every slot.
        problems: faults with something wrong.
    """

    kind: str
    times: int
    dealt_with: int
    stall_median_s: float | None
    stall_max_s: float | None
    recovery_median_s: float | None
    recovery_max_s: float | None
    problems: int


@dataclass
class SoakResult:
    """A soak from its begin to its end.

    Attributes:
        seed: of the schedule.
        options: what else is needed to repeat it.
        conditions: the machine and its load.
        began: [s, monotonic].
        seconds: how long it took, the undisturbed run apart.
        incidents: the faults, in order.
        checks: name of a check at the end → what it says.
        problems: what was wrong beyond single faults.
        growths: of the processes that lived long enough.
        interrupted: ended by Ctrl-C, so that some checks were not made.
        kept: folder with the run's records, where something was wrong.
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
        """Nothing was wrong, and all was checked."""
        faults = any(incident.problems for incident in self.incidents)
        return not faults and not self.problems and not self.interrupted

    def verdict(self) -> str:
        """One line."""
        bad = sum(bool(incident.problems) for incident in self.incidents) + len(self.problems)
        found = f"{bad} problem{'' if bad == 1 else 's'}"
        if self.interrupted:
            return f"interrupted after {len(self.incidents)} faults, {found} until then"
        if bad:
            return f"FAILED: {found} in {len(self.incidents)} faults"
        return f"passed: {len(self.incidents)} faults, none left a trace"

    def as_json(self) -> dict[str, Any]:
        """The body of the kept file."""
        return {
            "verdict": self.verdict(),
            "ok": self.ok,
            "seed": self.seed,
            "options": self.options,
            "seconds": round(self.seconds, 1),
            "kinds": [asdict(row) for row in rows_by_kind(self.incidents)],
            "checks": self.checks,
            "problems": self.problems,
            "faults": [incident.as_json(self.began) for incident in self.incidents],
            "growth": [asdict(growth) for growth in self.growths],
        }


def rows_by_kind(incidents: Sequence[Incident]) -> list[Row]:
    """One row for each kind that was made, in the order of the kinds."""
    rows = []
    for kind in KINDS:
        made = [incident for incident in incidents if incident.fault.kind == kind]
        if not made:
            continue
        stalls = [i.stall_s for i in made if i.stall_s is not None]
        recoveries = [i.recovery_s for i in made if i.recovery_s is not None]
        rows.append(
            Row(
                kind=kind,
                times=len(made),
                dealt_with=sum(incident.recovered is not None for incident in made),
                stall_median_s=_median(stalls),
                stall_max_s=_most(stalls),
                recovery_median_s=_median(recoveries),
                recovery_max_s=_most(recoveries),
                problems=sum(bool(incident.problems) for incident in made),
            )
        )
    return rows


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def _most(values: Sequence[float]) -> float | None:
    return round(max(values), 3) if values else None


_HEADINGS = (
    *("fault", "times", "dealt with", "no step for, median", "max [s]"),
    *("all there after, median", "max [s]", "problems"),
)


def _cells(row: Row) -> list[str]:
    times = (row.stall_median_s, row.stall_max_s, row.recovery_median_s, row.recovery_max_s)
    shown = ["-" if value is None else f"{value:.2f}" for value in times]
    return [row.kind, str(row.times), str(row.dealt_with), *shown, str(row.problems or "")]


def show_soak(result: SoakResult, console: Console) -> None:
    """Print the tables and the verdict."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="What each kind of fault cost", title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for row in rows_by_kind(result.incidents):
        table.add_row(*_cells(row))
    console.print(table)
    checks = Table(title="At the end", title_justify="left", show_header=False)
    for name, said in result.checks.items():
        checks.add_row(name, escape(said))
    console.print(checks)
    for problem in _all_problems(result):
        console.print(f"[red]{escape(problem)}[/]")
    console.print(result.conditions.sentence(), style="dim")
    if result.kept:
        console.print(f"records of the run: {result.kept}", highlight=False)
    colour = "green" if result.ok else "red"
    console.print(f"[bold {colour}]{escape(result.verdict())}[/] (seed {result.seed})")


def _all_problems(result: SoakResult) -> list[str]:
    faults = [
        f"{incident.fault.text()} ({incident.made.what}): {problem}"
        for incident in result.incidents
        for problem in incident.problems
    ]
    return [*faults, *result.problems]


def write_soak(result: SoakResult, path: Path) -> Path:
    """Keep the result as JSON, and beside it as Markdown; returns the path of that."""
    content = {"benchmark": "soak", "conditions": asdict(result.conditions), **result.as_json()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page = path.with_suffix(".md")
    page.write_text(_page(result), encoding="utf-8")
    return page


def _page(result: SoakResult) -> str:
    options = " ".join(f"{name}={json.dumps(value)}" for name, value in result.options.items())
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
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows_by_kind(result.incidents)]
    lines += ["", "## At the end", "", "| check | |", "|---|---|"]
    lines += [f"| {name} | {_one_line(said)} |" for name, said in result.checks.items()]
    problems = _all_problems(result)
    if problems:
        lines += ["", "## Problems", ""]
        lines += [f"- {_one_line(problem)}" for problem in problems]
    lines += ["", "## Kinds", ""]
    lines += [f"- `{r.kind}`: {KINDS[r.kind].meaning}" for r in rows_by_kind(result.incidents)]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
