"""Run Horovod's own tests on our build of Horovod and on an unpatched one, and print both results.

Each file of tests runs under ``horovodrun`` with two ranks and Gloo. Tests do not shut Horovod down
between them: initialising again under ``horovodrun`` races in every build. After a test that fails,
crashes or hangs, the ranks are started again for the rest.

    .venv/bin/python scripts/horovod_suite.py path/to/horovod
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

FILES = (
    "test_torch.py",
    "test_tensorflow.py",
    "test_process_sets_static.py",
    "test_tensorflow_process_sets.py",
    "test_tensorflow_process_sets_dynamic.py",
)
# Files that have to change for the release to compile.
COMPILED = re.compile(
    r"--- a/(CMakeLists\.txt|horovod/torch/CMakeLists\.txt|horovod/runner/js_run\.py"
    r"|.*flatbuffers.*|horovod/common/(common|group_table|nvtx_op_range)\.h)\n"
)
_SHOWN = 4000  # last characters of the output
WORST = ("crashed", "failed", "skipped", "passed")
LAUNCH = "from horovod.runner.launch import run_commandline; run_commandline()"
PLUGIN = """
import faulthandler, inspect, json, os, sys
import pytest

_told = open(os.environ["SUITE_RESULTS"] + "/" + os.environ["HOROVOD_RANK"], "a", buffering=1)
_done = set(json.loads(os.environ["SUITE_DONE"]))

def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if item.name not in _done]
    for kind in {item.cls for item in items if item.cls is not None}:
        if "shutdown" in inspect.getsource(kind.tearDown):
            def meet(self, hvd=sys.modules[kind.__module__].hvd):
                if hvd.is_initialized():
                    hvd.barrier()
            kind.tearDown = meet

def pytest_runtest_logstart(nodeid, location):
    faulthandler.dump_traceback_later(float(os.environ["SUITE_LIMIT_S"]), exit=True)
    _told.write(json.dumps([nodeid.split("::")[-1], "crashed"]) + "\\n")

def pytest_runtest_logreport(report):
    if report.failed or report.when == "call" or report.skipped:
        _told.write(json.dumps([report.nodeid.split("::")[-1], report.outcome]) + "\\n")
"""


def compile_only_patch() -> str:
    """Return the part of our patch without which the release does not compile."""
    from hvd_elastic.install.build_horovod import PATCH

    parts = re.split(r"(?m)^(?=--- a/)", PATCH.read_text(encoding="utf-8"))
    return "".join(part for part in parts if COMPILED.match(part))


def unpacked(name: str, folder: Path, jobs: int) -> Path:
    """Return a folder with the build ``ours`` or ``unpatched``, which is made if it is not kept."""
    from hvd_elastic.install.build_horovod import PATCH, build_wheel, keep_wheel, patch_digest
    from hvd_elastic.install.horovod_wheel import cached_wheel, detect_inputs

    inputs = detect_inputs(patch_digest())
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-suite-") as temporary:
        work, patch = Path(temporary), PATCH
        if name == "unpatched":
            inputs, patch = replace(inputs, patch="none"), work / "compile.patch"
            patch.write_text(compile_only_patch(), encoding="utf-8")
        wheel = cached_wheel(inputs)
        if wheel is None:
            wheel = build_wheel(inputs, work, work / "log", jobs, patch)
            wheel = keep_wheel(wheel, inputs, 0.0)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def worst(rows: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the worst of what the ranks have told of each test; one without an end crashed."""
    ranks: dict[str, str] = {}
    for test, outcome in rows:
        last = ranks.get(test, "crashed")
        both_ended = "crashed" not in (last, outcome)
        ranks[test] = min(last, outcome, key=WORST.index) if both_ended else outcome
    return ranks


def run_file(build: Path, tests: Path, file: str, limit_s: float) -> dict[str, str]:
    """Return the outcome of each test of a file; one that takes longer than the limit crashed."""
    done: dict[str, str] = {}
    while True:
        with tempfile.TemporaryDirectory() as results, tempfile.TemporaryFile() as log:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(build), str(tests)]),
                "SUITE_RESULTS": results,
                "SUITE_DONE": json.dumps([*done]),
                "SUITE_LIMIT_S": str(limit_s),
            }
            pytest = ["-m", "pytest", "-q", "-x", "-p", "suite_plugin", "-p", "no:xdist"]
            command = [sys.executable, "-c", LAUNCH, "--gloo", "-np", "2", sys.executable]
            status = subprocess.run(
                [*command, *pytest, str(tests / "parallel" / file)],
                env=environment,
                cwd=tests,
                stdout=log,
                stderr=subprocess.STDOUT,
            ).returncode
            found: dict[str, str] = {}
            for path in sorted(Path(results).iterdir()):
                rows = [json.loads(line) for line in path.read_text().splitlines()]
                for test, outcome in worst(rows).items():
                    found[test] = min(outcome, found.get(test, outcome), key=WORST.index)
            if not done and not found:
                log.seek(0)
                said = log.read().decode(errors="replace")[-_SHOWN:]
                raise SystemExit(f"{said}\nno test of {file} has begun, see above")
        done |= found
        if status == 0 or not found:
            return done


def show(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> None:
    """Print both lists: how many tests of each file ended how, and those that did not pass."""
    for build, files in found.items():
        print(f"\n{build}")
        for file, outcomes in files.items():
            counts = Counter(outcomes.values())
            print(f"  {file}: " + ", ".join(f"{counts[each]} {each}" for each in WORST[::-1]))
            for test, outcome in sorted(outcomes.items()):
                if outcome in ("failed", "crashed"):
                    print(f"    {outcome}: {test}")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Horovod 0.28.1")
    parser.add_argument("--builds", nargs="+", default=["ours", "unpatched"])
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    chosen = parser.parse_args()
    source = chosen.checkout / "test"
    if not (source / "parallel").is_dir():
        raise SystemExit(f"{chosen.checkout} is no checkout of Horovod: it has no test/parallel")
    found: dict[str, dict[str, dict[str, str]]] = {}
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-suite-") as temporary:
        tests = Path(temporary, "test")
        for folder in ("parallel", "utils"):
            shutil.copytree(source / folder, tests / folder)
        (tests / "mock.py").write_text("from unittest.mock import *\n", encoding="utf-8")
        (tests / "suite_plugin.py").write_text(PLUGIN, encoding="utf-8")
        for name in chosen.builds:
            build = unpacked(name, Path(temporary, name), chosen.jobs)
            for file in chosen.files:
                print(f"{name}: {file}", file=sys.stderr)
                found.setdefault(name, {})[file] = run_file(build, tests, file, chosen.limit)
    show(found)


if __name__ == "__main__":
    main()
