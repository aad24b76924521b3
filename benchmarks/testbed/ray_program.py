"""A user's Ray program, with our ``ElasticTrainer`` or Ray Train: what the benchmark measures.

``python -m benchmarks.testbed.ray_program ours|theirs FOLDER RANKS MOST SCRIPT [ARG]...``, on a
node. It connects to the cluster, writes the time to ``FOLDER/asked``, and has the script run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.testbed.marking import tell_time

_EACH = {"slots": 1, "CPU": 1}
_FORWARDED = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONPATH")
"""Variables of this program that workers get too: Ray starts them with those of its own daemons."""


def main() -> None:
    """Run the program."""
    import ray

    whose, folder, _, most, script, *arguments = sys.argv[1:]
    variables = {name: os.environ[name] for name in _FORWARDED}
    ray.init(log_to_driver=False, runtime_env={"env_vars": variables})
    tell_time(Path(folder, "asked"))
    if whose == "ours":
        _ours(int(most), script, arguments)
    else:
        _theirs(Path(folder, "ray-train"), int(most), script, arguments)


def _ours(most: int, script: str, arguments: Sequence[str]) -> None:
    from hvd_elastic.ray import ElasticTrainer

    trainer = ElasticTrainer(
        script,
        arguments,
        scaling=(1, most),
        resources_per_worker=_EACH,
        run_options={"run_id": "bench"},
    )
    trainer.fit()


def _theirs(storage: Path, most: int, script: str, arguments: Sequence[str]) -> None:
    """Train with Ray Train's elastic trainer, at its defaults."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def run_script() -> None:
        import runpy

        import torch.distributed

        # The script does this itself under torchrun; here Ray has done it.
        torch.distributed.init_process_group = lambda *_, **__: None
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")

    trainer = TorchTrainer(
        run_script,
        scaling_config=ScalingConfig(num_workers=(1, most), resources_per_worker=_EACH),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            storage_path=str(storage), failure_config=FailureConfig(max_failures=-1)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
