"""Show and write the result of ``hvd-elastic bench synthetic``, and its progress on a terminal."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_elastic.errors import UsageError
from hvd_elastic.formatting import count, duration_words, plural, unfiltered
from hvd_elastic.replaced_files import temporary_in

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from hvd_elastic.bench.background_run import Say
    from hvd_elastic.bench.scaling import Cost, Scaling

Table = tuple[str, list[list[str]]]
"""Heading and rows; the first row is the head."""
_SUFFIXES = (".json", ".csv", ".html", ".png")
_PICTURE = (1100, 640)
"""Size of the chart with its words in a PNG file [pixels]."""


@contextmanager
def progress_line() -> Iterator[Say]:
    """Yield a function that shows a line of progress: in place on a terminal, else one by one."""
    from rich.console import Console

    console = Console(file=unfiltered(sys.stderr))
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("starting") as status:
        yield status.update


class LiveTable:
    """The sizes on a terminal while they are measured; elsewhere a line for each step of the way.

    Args:
        sizes: numbers of slots.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._cells = dict.fromkeys(sorted(sizes), ("", "", ""))
        self._words = "starting"
        console = Console(file=unfiltered(sys.stderr))
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, transient=True, get_renderable=self._table)

    @contextmanager
    def shown(self) -> Iterator[LiveTable]:
        """Show it for the length of the block."""
        if self._live is None:
            yield self
            return
        with self._live:
            yield self

    def say(self, text: str) -> None:
        """Show what is being done."""
        self._words = text
        if self._live is None:
            print(text, file=sys.stderr, flush=True)

    def measured(self, slots: int, per_s: float, noise: float | None) -> None:
        """Show the throughput of a size.

        Args:
            per_s: throughput [examples/s], so far if it is still being measured.
            noise: half of its 95 % interval, relative; None: it is still being measured.
        """
        spread = "…" if noise is None else f"±{100 * noise:.1f} %"
        self._cells[slots] = (rate_words(per_s), spread, rate_words(per_s / slots))
        if self._live is None and noise is not None:
            print(f"{count(slots, 'slot')}: {rate_words(per_s)} examples/s", file=sys.stderr)

    def _table(self) -> RichTable:
        from rich.table import Table as RichTable

        table = RichTable(caption=self._words, box=None)
        for head in ("slots", "examples/s", "95 %", "each slot"):
            table.add_column(head, justify="right")
        for slots, cells in self._cells.items():
            table.add_row(str(slots), *cells)
        return table


def check_out(paths: Sequence[Path]) -> None:
    """Raise UsageError if a file cannot be written: its format, its folder, no browser."""
    for path in paths:
        if path.suffix not in _SUFFIXES:
            raise UsageError(f"--out {path}: its name has to end in {', '.join(_SUFFIXES)}")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"--out {path}: the folder {path.absolute().parent} does not exist")
        try:
            with temporary_in(path.absolute().parent) as temporary:
                temporary.touch()
        except OSError as error:
            raise UsageError(f"--out {path}: it cannot be written: {error.strerror}") from error
        if path.is_dir():
            raise UsageError(f"--out {path}: it cannot be written: Is a directory")
        if path.suffix == ".png":
            from hvd_elastic.views.plan_page import find_browser

            find_browser()


def tables_of(found: Scaling, examples: int, epochs: float) -> list[Table]:
    """Return what was measured and predicted, and the cost where prices are known."""
    from hvd_elastic.bench.scaling import costs

    heads = ["slots", "hosts", "examples/s", "95 %", "each slot", "efficiency", "step", "compute"]
    rows = [[*heads, "exposed comm.", "rest"]]
    for size in found.sizes:
        compute = "–" if size.compute_s is None else duration_words(size.compute_s)
        rows.append(
            [
                *(str(size.slots), str(size.hosts), rate_words(size.throughput)),
                f"±{100 * size.half_s / size.step_s:.1f} %",
                *(rate_words(size.throughput / size.slots), f"{100 * size.efficiency:.0f} %"),
                *(duration_words(size.step_s), compute, duration_words(size.exposed_s)),
                duration_words(size.rest_s),
            ]
        )
    tables = [("measured", rows)]
    if found.predicted or found.unknown:
        rows = [["slots", "hosts", "examples/s", "95 %", "efficiency"]]
        for each in found.predicted:
            between = f"{rate_words(each.low)} to {rate_words(each.high)}"
            share = f"{100 * each.efficiency:.0f} %"
            rows.append(
                [str(each.slots), str(each.hosts), rate_words(each.throughput), between, share]
            )
        rows += [[str(slots), "", "not known", "", ""] for slots, _ in found.unknown]
        tables.append(("predicted", rows))
    if priced := costs(found, examples, epochs):
        rows = [["slots", "an epoch", f"{epochs:g} {plural('epoch', epochs)}", "time"]]
        rows += [
            [
                f"{cost.slots}{'' if cost.measured else ' (predicted)'}",
                *(f"{cost.epoch_cost:.2f}", f"{cost.cost:.2f}", duration_words(3600 * cost.hours)),
            ]
            for cost in priced
        ]
        tables.append((f"cost of epochs of {examples:,} examples", rows))
    return tables


def rate_words(per_s: float) -> str:
    """Return a number of examples/s."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def notes_of(found: Scaling, examples: int, epochs: float, deadline_h: float | None) -> list[str]:
    """Return sentences about the result, the knee of the cost, and the deadline."""
    from hvd_elastic.bench.scaling import cheapest_by, costs, gradient_words, knee

    settings = found.settings
    emulated = ", device emulated" if settings.emulated else ""
    what = f"{settings.model}, {settings.framework}, {settings.precision}{emulated}"
    notes = [f"{what}; {gradient_words(found.parameters)}, {settings.batch_size} examples a slot"]
    notes += [found.words] if found.words else []
    if found.check is not None:
        slots, ratio = found.check
        off = abs(100 * (ratio - 1))
        notes.append(f"From the smaller sizes alone, {slots} slots are predicted {off:.1f} % off.")
    if found.unknown:
        slots, why = found.unknown[0]
        notes.append(f"Not known: with {count(slots, 'slot')}, {why}. Measure it: --np {slots}")
    if priced := costs(found, examples, epochs):
        bend = knee(priced)
        notes.append(f"Up to {_cost_words(bend)} speed grows at least half as fast as the price.")
        if deadline_h is not None:
            best = cheapest_by(priced, deadline_h)
            notes.append(
                f"No size trains {epochs:g} {plural('epoch', epochs)} within {deadline_h:g} h."
                if best is None
                else f"The cheapest within {deadline_h:g} h: {_cost_words(best)}."
            )
    return notes


def _cost_words(cost: Cost) -> str:
    return f"{count(cost.slots, 'slot')} ({cost.cost:.2f}, {duration_words(3600 * cost.hours)})"


def write_scaling(path: Path, found: Scaling, tables: Sequence[Table]) -> None:
    """Write the result in the format that the name of the file ends in."""
    from hvd_elastic.views.page import write_page
    from hvd_elastic.views.plan_page import render_scaling, write_picture

    result = found.as_json()
    if path.suffix == ".json":
        write_page(path, json.dumps(result, indent=2) + "\n")
    elif path.suffix == ".html":
        write_page(path, render_scaling(found.settings.model, result, tables))
    elif path.suffix == ".png":
        write_picture(render_scaling(found.settings.model, result, ()), path, *_PICTURE)
    else:
        text = io.StringIO()
        rows = csv.DictWriter(text, [*result["sizes"][0], "predicted"], restval="")
        rows.writeheader()
        rows.writerows({**size, "predicted": False} for size in result["sizes"])
        rows.writerows({**size, "predicted": True} for size in result["predicted"])
        write_page(path, text.getvalue())
