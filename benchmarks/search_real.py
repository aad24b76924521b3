"""A real search of 16 trials on four virtual hosts of two slots: ours, and Ray Tune's halving.

Four learning rates and four widths, 27 epochs on handwritten digits with an emulated device (one
slot takes 97 s), rungs at 3, 9 and 27 epochs. Ours lets slots go where they help; a trial of Ray
Tune has one. The time counts from the command, Ray's cluster runs before.

Run it: ``python benchmarks/search_real.py --out benchmarks/results/search_real.json``, 10 minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sharing.cluster import Cluster
from benchmarks.testbed.command import Say, at_least_one, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT
from benchmarks.testbed.ray import VirtualRay
from hvd_elastic.bench.digits_data import write_digits
from hvd_elastic.errors import UsageError
from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.virtual import VirtualCluster

RATES, WIDTHS = ("0.003", "0.01", "0.03", "0.1"), ("2", "4", "8", "16")
HOSTS, SLOTS = 4, 2
EPOCHS = 27
EXAMPLES = 704
"""Useful examples of an epoch: a little less than it has."""
NEAR = 0.995
LIMIT_S = 900.0
_PEERS = ROOT / "benchmarks" / "peers"


def search_ours(
    bed: VirtualCluster, folder: Path, data: Path, reports: Path, epochs: int
) -> dict[str, Any]:
    """Search with ``hvd-elastic search``; return what is known beside the reports."""
    text = "".join(f"{host} slots={SLOTS}\n" for host in bed.hosts)
    cluster = Cluster(folder / "ours", text, "--ssh-config", bed.ssh_config)
    script = [sys.executable, str(_PEERS / "search_digits.py"), "--data", str(data)]
    script += ["--reports", str(reports), "--lr", "{lr}", "--width", "{width}"]
    script += ["--epochs", str(epochs)]
    options = [f"--param=lr={','.join(RATES)}", f"--param=width={','.join(WIDTHS)}"]
    options += ["--metric=accuracy", "--goal=max", "--trials=16", "--sampler=grid", "--rungs=3"]
    options += [f"--max-examples={epochs * EXAMPLES}", "--name=digits", "--audit"]
    with cluster.up():
        times = _run(
            [*OUR_PROGRAM, "search", *options, "--", *script],
            {"HVD_ELASTIC_HOME": str(cluster.home), "PYTHONPATH": str(ROOT)},
            cluster.home,
        )
    audits = [
        check_audit(read_records(path), finished=False).ok
        for path in sorted(cluster.home.glob("runs/*/audit.jsonl"))
    ]
    return {**times, "runs": len(audits), "exact": sum(audits)}


def search_ray(
    bed: VirtualCluster, folder: Path, data: Path, reports: Path, epochs: int
) -> dict[str, Any]:
    """Search with Ray Tune; return when that began and ended."""
    ray = VirtualRay(bed, folder / "ray", slots=SLOTS, cpus=SLOTS)
    ray.use(bed.hosts)
    program = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", "python"]
    program += [str(_PEERS / "search_tune.py"), str(data), str(reports)]
    program += [",".join(RATES), ",".join(WIDTHS), str(epochs)]
    command = ray.words("exec", "--cwd", str(ROOT), "--", *program)
    try:
        ray.up()
        return _run(command, {"HVD_ELASTIC_HOME": str(ray.home)}, folder)
    finally:
        ray.call("down")


def _run(command: Sequence[str], variables: dict[str, str], folder: Path) -> dict[str, Any]:
    """Run a command; return when it began and ended [Unix s]."""
    began = time.time()
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[:4]} ended with {done.returncode}: {done.stdout[-3000:]}")
    return {"began": began, "end": time.time()}


SEARCHES: dict[str, Callable[[VirtualCluster, Path, Path, Path, int], dict[str, Any]]] = {
    "ours": search_ours,
    "ray-tune": search_ray,
}


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Search in each way, in turn."""
    check_names("--ways", options.ways, SEARCHES)
    if options.epochs < 9:
        raise UsageError("--epochs is 9 or more: the first of three rungs is at a ninth of them")
    load_before = os.getloadavg()
    found: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="search-") as scratch:
        data = Path(scratch, "digits")
        write_digits(data)
        for number in range(options.rounds):
            for way in options.ways:
                folder = Path(scratch, f"{way}-{number}")
                folder.mkdir()
                reports = folder / "reports.jsonl"
                with VirtualCluster.up(HOSTS, SLOTS, shares=[Path(scratch)]) as bed:
                    more = SEARCHES[way](bed, folder, data, reports, options.epochs)
                lines = reports.read_text(encoding="utf-8").splitlines()
                found.append((way, [json.loads(line) for line in lines], more))
                say(f"{way}: {more['end'] - more['began']:.0f} s, {len(lines)} epochs")
    best = max(each["accuracy"] for _, told, _ in found for each in told)
    rows = [_row(way, told, more, best, options.epochs) for way, told, more in found]
    note = f"The best accuracy of all is {best:.4f}."
    peers = ["ray"] if "ray-tune" in options.ways else []
    versions = {name: importlib.metadata.version(name) for name in peers}
    taken = conditions(f"{HOSTS} virtual hosts of {SLOTS} slots", note, load_before, versions)
    return Result("search_real", taken, {"searches": rows})


def _row(
    way: str, told: Sequence[dict[str, Any]], more: dict[str, Any], best: float, number: int
) -> dict[str, Any]:
    """Return the figures of a search."""
    epochs = [(each["lr"], each["width"], each["epoch"]) for each in told]
    near = [each["t"] for each in told if each["accuracy"] >= NEAR * best]
    return {
        "way": way,
        "near_s": min(near) - more["began"] if near else None,
        "whole_s": more["end"] - more["began"],
        "best": max(each["accuracy"] for each in told),
        "trials": len({each[:2] for each in epochs}),
        "whole trials": sum(epoch == number - 1 for _, _, epoch in epochs),
        "epochs": len({*epochs}),
        "epochs again": len(epochs) - len({*epochs}),
        "runs": more.get("runs"),
        "exact audits": more.get("exact"),
    }


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    told = f"of {', '.join(SEARCHES)} (both)"
    parser.add_argument("--ways", type=names, default=list(SEARCHES), help=told)
    parser.add_argument("--rounds", type=at_least_one, default=1, help="repetitions (1)")
    told = "epochs of a whole training, 9 or more (27)"
    parser.add_argument("--epochs", type=at_least_one, default=EPOCHS, help=told)
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
