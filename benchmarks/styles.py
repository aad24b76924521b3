"""Measures what our library costs PyTorch scripts of many styles at one rank: lines and step time.

Run it: ``python benchmarks/styles.py --out benchmarks/results/styles.json``. Each style is a plain
script and the same one with our library, in ``tests/dist/styles``; ``tests/dist/test_styles.py``
runs them too. A pair of processes, one of each script, trains in turns of some steps, so that other
load on the machine affects both equally. Two processes of the same script differ by some per cent,
so several pairs are measured.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from typing_extensions import Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import (
    Say,
    at_least_one,
    check_names,
    names,
    run_benchmark,
)
from benchmarks.testbed.figures import Result, conditions
from hvd_elastic.errors import RunError

STYLES = Path(__file__).resolve().parents[1] / "tests/dist/styles"
ALL = sorted(path.stem for path in (STYLES / "plain").glob("*.py"))
LIMIT = 1.03
WARM_STEPS = 5
FEWEST_STEPS = 4
WIDTHS = {
    **dict.fromkeys(("accumulation", "contrastive", "early_stop", "ema", "n_steps"), 48),
    "actor_critic": 8,
    "plateau": 48,
    "several_losses": 48,
    "transformer": 0.25,
}
"""Width of the layers relative to the other styles, so that a step takes some tens of ms."""
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Lets glibc keep freed memory.

Otherwise the order in which a process first frees large blocks decides which of them it maps anew
in each step, and two processes of the same script differ by up to 50 %.
"""
_NOTE = (
    "CPU, one thread, float64. The ratio of a pair of processes is the median ratio of two "
    "neighbouring turns; the interval holds the median over pairs with 95 % confidence."
)


def changed_lines(plain: str, elastic: str) -> tuple[int, int]:
    r"""Return the number of lines that differ, and of lines that are only indented differently.

    A line that was replaced by another one counts once; blank lines do not count.

    >>> changed_lines("a = 1\nb = 2\n\nc = 3\n", "a = 1\nif a:\n    b = 2\nc = 4\n")
    (2, 1)
    """
    before, after = ([x for x in text.splitlines() if x.strip()] for text in (plain, elastic))
    stripped = [[line.strip() for line in lines] for lines in (before, after)]
    matcher = difflib.SequenceMatcher(None, stripped[0], stripped[1], autojunk=False)
    changed = indented = 0
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            indented += sum(x != y for x, y in zip(before[a:b], after[c:d], strict=True))
        else:
            changed += max(b - a, d - c)
    return changed, indented


def scaled(text: str, **constants: int) -> str:
    r"""Return a script with other values of constants that it sets in lines of their own.

    >>> scaled("WIDTH = 16\nprint(WIDTH)", WIDTH=512, PATIENCE=3)
    'WIDTH = 512\nprint(WIDTH)'
    """
    for name, value in constants.items():
        text = re.sub(rf"^{name} = \d+$", f"{name} = {value}", text, flags=re.MULTILINE)
    return text


def median_interval(samples: list[float]) -> tuple[float, float]:
    """Return an interval that holds the median with 95 % confidence, by order statistics.

    >>> median_interval([float(number) for number in range(1, 13)])
    (3.0, 10.0)
    """
    ordered, count = sorted(samples), len(samples)
    # Normal approximation of the binomial distribution of the number of samples below the median.
    outside = max(0, round(count / 2 - 0.98 * count**0.5 - 0.5))
    return ordered[outside], ordered[-1 - outside]


class Script:
    """A process that trains some steps whenever it is told to."""

    def __init__(self, script: Path) -> None:
        # Not of a worker, even if the benchmark itself runs in one.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HVD_", "HOROVOD_"))}
        root = str(STYLES.parents[2])
        self.name = f"{script.parent.name}/{script.name}"
        self._log = script.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--train", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=script.parent,
                env={**kept, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **_KEEP_MEMORY},
            )

    def steps(self, count: int) -> float:
        """Train ``count`` steps; return the time of one [s]."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(f"{count}\n".encode())
            stdin.flush()
            return float(stdout.readline()) / count
        except (OSError, ValueError):
            said = self._log.read_text(errors="replace")[-2000:]
            raise RunError(f"{self.name} ended before its time:\n{said}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def train(script: Path) -> None:
    """Run a script that waits before its first step, and after as many as it was told to take."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the script prints
    left = [1]
    began = [0.0]

    def step(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            took = time.perf_counter() - began[0]
            if began[0]:
                print(took, file=answers, flush=True)
            left[0] = int(sys.stdin.readline() or sys.exit())
            began[0] = time.perf_counter()

    register_optimizer_step_post_hook(step)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


def measure_pair(scripts: list[Path], options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return times of a step of the plain and the elastic script, for each turn [s]."""
    turns = []
    with Script(scripts[0]) as plain, Script(scripts[1]) as elastic:
        slowest = max(script.steps(WARM_STEPS) for _ in range(2) for script in (plain, elastic))
        steps = max(FEWEST_STEPS, round(options.turn_s / slowest))
        for number in range(options.rounds):
            order = [plain, elastic][:: 1 if number % 2 else -1]
            times = {script: script.steps(steps) for script in order}
            turns.append((times[plain], times[elastic]))
    return turns


def measure_style(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of one style."""
    texts = [(STYLES / kind / f"{name}.py").read_text("utf-8") for kind in ("plain", "elastic")]
    changed, indented = changed_lines(*texts)
    row: dict[str, Any] = {"style": name, "lines": len(texts[0].splitlines())}
    row |= {"changed_lines": changed, "indented_lines": indented}
    if options.rounds == 0:
        return row
    scripts = []
    for kind, text in zip(("plain", "elastic"), texts, strict=True):
        scripts.append(folder / kind / f"{name}.py")
        scripts[-1].parent.mkdir(exist_ok=True)
        width = int(options.width * WIDTHS.get(name, 1))
        endless = scaled(text, WIDTH=width, EPOCHS=10**6, PATIENCE=10**6)
        scripts[-1].write_text(endless, encoding="utf-8")
    plain: list[float] = []
    ours: list[float] = []
    ratios: list[float] = []
    for _ in range(options.pairs):
        turns = measure_pair(scripts, options)
        ratios.append(statistics.median(our / their for their, our in turns))
        plain += [their for their, _ in turns]
        ours += [our for _, our in turns]
    low, high = median_interval(ratios)
    row |= {"plain_s": statistics.median(plain), "elastic_s": statistics.median(ours)}
    row |= {"ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high}
    wide = high - low > 0.04
    return row | {"within_limit": None if wide else row["ratio"] <= LIMIT, "samples": ratios}


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure all chosen styles."""
    check_names("--styles", options.styles, ALL)
    load_before, rows = os.getloadavg(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.styles:
            try:
                rows.append(measure_style(name, options, Path(folder)))
            except RunError as error:
                if not options.keep_going:
                    raise
                say(str(error))
                continue
            say(f"{name}: measured")
    turns = f"{options.pairs} pairs, {options.rounds} turns of {options.turn_s:g} s each."
    note = f"{_NOTE} Width {options.width}, {turns}"
    made = conditions("no hosts", note, load_before)
    return Result("styles", made, {"styles": rows})


def main() -> int:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    told = "comma-separated (default: all)"
    parser.add_argument("--styles", type=names, default=ALL, help=told)
    told = "pairs of processes for each style (default: 8)"
    parser.add_argument("--pairs", type=at_least_one, default=8, help=told)
    told = "turns of each process; 0 counts lines only (default: 4)"
    parser.add_argument("--rounds", type=int, default=4, help=told)
    told = "duration of a turn in seconds (default: 0.4)"
    parser.add_argument("--turn-s", type=float, default=0.4, metavar="S", help=told)
    told = "width of the layers; sets the time of a step (default: 1024)"
    parser.add_argument("--width", type=at_least_one, default=1024, help=told)
    told = "leave out styles that fail, instead of ending"
    parser.add_argument("--keep-going", action="store_true", help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]))
    else:
        sys.exit(main())
