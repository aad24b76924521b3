"""A user's Ray program, with our ``ElasticTrainer`` or Ray Train: what the benchmark measures.

``python -m benchmarks.testbed.ray_program ours|theirs FOLDER MOST SCRIPT [ARG]...``, on a node. It
connects to the cluster, writes the time to ``FOLDER/asked``, and has the script run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

EACH = {"slots": 1, "CPU": 1}


def ours(most: int, script: str, arguments: list[str]) -> None:
    """Train with :class:`hvd_elastic.ray.ElasticTrainer`."""
    from hvd_elastic.ray import ElasticTrainer

    ElasticTrainer(
        script,
        arguments,
        scaling=(1, most),
        resources_per_worker=EACH,
        run_options={"run_id": "bench"},
    ).fit()


def theirs(folder: Path, most: int, script: str, arguments: list[str]) -> None:
    """Train with Ray Train's elastic trainer, at its defaults."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    variables = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}

    def run_script() -> None:
        import runpy

        import torch.distributed

        os.environ.update(variables)
        # The script does this itself under torchrun; here Ray has done it.
        torch.distributed.init_process_group = lambda *_, **__: None
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")

    TorchTrainer(
        run_script,
        scaling_config=ScalingConfig(num_workers=(1, most), resources_per_worker=EACH),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            storage_path=str(folder / "ray-train"), failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()


def main() -> None:
    """Run the program."""
    import ray

    whose, name, most, script, *arguments = sys.argv[1:]
    folder = Path(name)
    ray.init(log_to_driver=False)
    asked = folder / "asked"
    asked.with_suffix(".new").write_text(str(time.monotonic()), encoding="utf-8")
    asked.with_suffix(".new").replace(asked)
    if whose == "ours":
        ours(int(most), script, arguments)
    else:
        theirs(folder, int(most), script, arguments)


if __name__ == "__main__":
    main()
