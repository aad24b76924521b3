"""Measures what an input host brings to a host whose cores cannot feed its device.

A training host of half a core with an emulated device, and an input host of a whole core, both
held by control groups. A transform takes as much processor time as the device takes for a step.
Compared with a loader that costs nothing, and with the training host's own cores alone.

    python benchmarks/input.py [--rounds N]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from hvd_elastic.errors import VirtualClusterError  # noqa: E402
from hvd_elastic.virtual import VirtualCluster  # noqa: E402
from hvd_elastic.virtual.cpushare import CpuGroups  # noqa: E402

TRAINS_CORES, READS_CORES = 0.5, 1.0
BATCH, TRANSFORM_MS, WARM, STEPS = 16, 5.0, 15, 60
PRICES = {"trains": 3.0, "reads": 0.4}
"""Examples of prices [per hour], of a GPU host and of a host with cores only."""
CASES = {
    "loader that costs nothing": (0.0, 0, False),
    "training host alone": (TRANSFORM_MS, 1, False),
    "with the input host": (TRANSFORM_MS, 1, True),
}


def measure(cluster: VirtualCluster, folder: Path, case: str) -> float:
    """Return the throughput of a run [examples/s]."""
    transform_ms, processes, helped = CASES[case]
    trains, reads = cluster.hosts
    hostfile, result = folder / "hosts", folder / "result.json"
    hostfile.write_text(f"{trains} slots=1\n")
    result.unlink(missing_ok=True)
    options = ["--input-hosts", reads] if helped else []
    script = [sys.executable, str(ROOT / "benchmarks" / "input_worker.py"), str(result)]
    numbers = {
        "--transform-ms": transform_ms,
        "--step-ms": BATCH * TRANSFORM_MS,
        "--batch": BATCH,
        "--warm": WARM,
        "--steps": STEPS,
        "--num-workers": processes,
    }
    words = [str(word) for pair in numbers.items() for word in pair]
    options += ["--hostfile", str(hostfile), "--ssh-config", str(cluster.ssh_config)]
    run = [sys.executable, "-m", "hvd_elastic.cli.app", "run", "--checkpoint-every", "0"]
    done = subprocess.run(
        [*run, *options, "--", *script, *words],
        env={
            **os.environ,
            "HVD_ELASTIC_HOME": str(folder / "home"),
            "PYTHONPATH": f"{ROOT / 'tests/quick_torch'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{case}: {done.stdout}{done.stderr}")
    found = json.loads(result.read_text())
    return found["examples"] / found["seconds"]


def main() -> int:
    """Run all cases in turn and print their throughput."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="hvd_elastic-input-") as name:
        folder = Path(name)
        if CpuGroups.find("probe") is None or os.geteuid() != 0:
            print("skipped: no control groups for processor shares, or not root")
            return 0
        try:
            made = VirtualCluster.up(2, 1, cpus=TRAINS_CORES, shares=[folder])
        except VirtualClusterError as error:
            print(f"skipped: {error}")
            return 0
        with made as cluster:
            groups = CpuGroups.find(cluster.name)
            assert groups is not None
            groups.make(cluster.hosts[1], READS_CORES)
            for _ in range(rounds):
                for case in CASES:
                    found[case].append(measure(cluster, folder, case))
                    print(f"{case:<28} {found[case][-1]:7.1f} examples/s", flush=True)
    free = median(found["loader that costs nothing"])
    for case, each in found.items():
        price = PRICES["trains"] + (PRICES["reads"] if CASES[case][2] else 0.0)
        cost = 1e6 * price / 3600 / median(each)
        print(
            f"{case:<28} median {median(each):7.1f} examples/s, {median(each) / free:.2f} of a "
            f"loader that costs nothing, {cost:.2f} for a million examples"
        )
    print("Ray Data and tf.data service: not measured here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
