"""What a trainer refuses, and how its run continues; no Ray is needed for that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.engines.dial_in.hosts import DialInHosts
from hvd_elastic.engines.dial_in.training import on_this_machine
from hvd_elastic.engines.ray import trainer
from hvd_elastic.errors import ArgumentError, RunError
from hvd_elastic.ray import ElasticTrainer
from hvd_elastic.records.run_folder import list_runs
from tests.paths import LITTLE_WORK, WORKER_PYTHONPATH
from tests.unit.engines.dial_in.test_training import train_and_fail_once


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scaling": (1, 2, 3)}, r"the least and largest number, not \(1, 2, 3\)"),
        (
            {"scaling": SimpleNamespace(num_workers=4, use_gpu=True, resources_per_worker=None)},
            r"write scaling=4, resources_per_worker={'GPU': 1}",  # for a ScalingConfig of Ray
        ),
        ({"scaling": (3, 1)}, "at least 3 and at most 1"),
        ({"scaling": 0}, "least number of processes is 0"),
        ({"scaling": 1.5}, r"least number of processes is 1\.5"),
        ({"train_fn_args": {"lr": 0.1}}, r"write \({'lr': 0.1},\)"),
        ({"datasets": [1, 2]}, "by name"),
        ({"resources_per_worker": {"GPU": -1}}, "GPU is -1"),
        ({"train_fn": 3}, "3 cannot be trained"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        ElasticTrainer(**{"train_fn": print, "scaling": (1, 2), **changes})


def test_a_driver_that_starts_again_continues_by_its_checkpoint_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("horovod.torch")
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path / "home"))
    node = {"Alive": True, "Resources": {"CPU": 2}, "NodeManagerAddress": "127.0.0.1"}
    monkeypatch.setattr(trainer, "_connected_ray", lambda: SimpleNamespace(nodes=lambda: [node]))
    acquire = on_this_machine(1, {**LITTLE_WORK, "PYTHONPATH": WORKER_PYTHONPATH})

    def start_actor(_: object, hosts: DialInHosts, **__: object) -> object:
        return acquire(hosts)

    monkeypatch.setattr(ElasticTrainer, "_acquire", start_actor)
    place = tmp_path / "checkpoints"
    args = (str(tmp_path / "failed"), str(place))
    options = {"checkpoint_every_s": 0.2, "checkpoint_folder": str(place)}
    fitting = ElasticTrainer(train_and_fail_once, args, scaling=1, run_options=options)
    with pytest.raises(RunError, match="no such loss"):
        fitting.fit()
    (folder,) = list_runs()
    result = fitting.fit()
    assert (result.value, result.run_id, result.folder) == (1, folder.run_id, folder.path)
    assert [each.run_id for each in list_runs()] == [folder.run_id]
