"""Examples that cannot be decoded are left out, counted and named, whoever reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_elastic.records.audit import check_audit
from hvd_elastic.records.json_lines import read_records
from hvd_elastic.virtual import VirtualCluster
from tests.dist import jobs
from tests.dist.jobs import Job, environment, hostfile_of, write_script
from tests.paths import COSTLY, LIMIT_S, NEEDS_TENSORFLOW
from tests.unit.data.shards import damage, write_numbers

pytestmark = pytest.mark.dist
hosts, shared = jobs.hosts, jobs.shared

SCRIPT = '''\
"""One weight, and the gradient of a step is the mean of the numbers in its batch."""
import json
import os
import signal
import sys
import time
from pathlib import Path

from hvd_elastic.data import ShardDataset

folder, shards, framework, reader = Path(sys.argv[1]), *sys.argv[2:]


def seen(value):
    (folder / f"read-on-{os.environ.get('HVD_ELASTIC_HOST')}").touch()
    return value


dataset = ShardDataset(shards, seen if reader == "input host" else None, on_error="skip")
own = {"seed_examples": reader != "plain"}
if framework == "torch":
    import torch

    import hvd_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model)
    own["num_workers"] = 0 if reader == "none" else 2
    loader = hvd.DataLoader(dataset, 9, **own)

    def step(batch):
        optimizer.zero_grad()
        model(batch[0].double()).mean().backward()
        optimizer.step()
else:
    import keras
    import tensorflow as tf

    import hvd_elastic.tensorflow as hvd

    hvd.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    loader = hvd.dataset(dataset, 9, **own)

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch[0]))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)


@hvd.run
def train(state):
    for epoch in hvd.epochs(2):
        for batch in loader:
            state.steps += 1
            while reader == "input host" and epoch == 1 and not (folder / "joined").exists():
                time.sleep(0.05)
            step(batch)
            mark = folder / "died"
            if hvd.size() > 1 and state.steps == 3 and hvd.rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    if hvd.rank() == 0:
        weight = model.weight if framework == "torch" else model.layers[0].kernel.numpy()
        (folder / "end.json").write_text(json.dumps(weight.item()))


train(hvd.State(model=model, optimizer=optimizer, steps=0))
'''

DAMAGED = [5, 9, 10, 11]
"""The last three are the whole share of the first of three ranks."""
WEIGHT = -0.1 * 2 * sum(set(range(45)).difference(DAMAGED)) / 9


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=COSTLY)])
@pytest.mark.parametrize(
    ("framework", "reader"),
    [
        ("torch", "plain"),
        pytest.param("torch", "seeded", marks=COSTLY),
        pytest.param("torch", "none", marks=COSTLY),
        pytest.param("tensorflow", "plain", marks=[COSTLY, NEEDS_TENSORFLOW]),
        pytest.param("tensorflow", "seeded", marks=[COSTLY, NEEDS_TENSORFLOW]),
    ],
)
def test_examples_that_cannot_be_decoded_count_nothing_at_any_number_of_ranks(
    tmp_path: Path, framework: str, reader: str, ranks: int
) -> None:
    shards = write_numbers(tmp_path / "shards", [20, 25])
    damage(shards, DAMAGED)
    script = write_script(tmp_path, SCRIPT)
    train = [sys.executable, script, tmp_path, shards, framework, reader]
    if ranks == 1:
        folder = tmp_path / "run"
        settings = {"HVD_ELASTIC_RUN_FOLDER": str(folder), "HVD_ELASTIC_AUDIT": "1"}
        env = environment(tmp_path) | settings
        subprocess.run([*map(str, train)], env=env, check=True, timeout=LIMIT_S)
        records = [*read_records(folder / "audit.jsonl")]
        skipped = [
            e for e in read_records(folder / "events.jsonl") if e["kind"] == "example_skipped"
        ]
    else:
        hosts = tmp_path / "hosts"
        hosts.write_text(f"localhost slots={ranks + 1}\n", encoding="utf-8")
        options = ["--hostfile", hosts, "--np", ranks, "--min-np", ranks, "--spares", 1, "--audit"]
        with Job(*options, "--", *train, home=tmp_path) as job:
            assert job.wait() == 0, job.text
            assert "example 'k0005' cannot be decoded: " in job.text
            records = [*read_records(job.folder / "audit.jsonl")]
            skipped = job.events("example_skipped")
        assert (tmp_path / "died").exists()
    assert {each["example"] for each in skipped} == {
        f"{shards}/s-00.tar: example 'k{number:04d}'" for number in DAMAGED
    }
    audit = check_audit(records, finished=True)
    assert audit.ok
    assert audit.skipped == 2 * len(DAMAGED)
    assert "; 8 uses skipped: cannot be decoded" in audit.sentence()
    found = json.loads((tmp_path / "end.json").read_text())
    assert found == pytest.approx(WEIGHT, rel=1e-6)


@COSTLY
@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=NEEDS_TENSORFLOW)])
def test_an_input_host_leaves_them_out_too(
    shared: Path, hosts: VirtualCluster, framework: str
) -> None:
    """It joins before the second epoch, and reads for the ranks then."""
    folder = shared / f"skipped-{framework}"
    folder.mkdir()
    shards = write_numbers(folder / "shards", [20, 25])
    damage(shards, DAMAGED)
    script = write_script(folder, SCRIPT)
    *ranks, reads = hosts.hosts
    options = ["-H", hostfile_of(folder / "hosts", ranks), "-F", hosts.ssh_config, "--audit"]
    options += ["--input-hosts", reads, "--np", 3]
    train = [sys.executable, script, folder, shards, framework, "input host"]
    with Job(*options, "--", *train, home=folder) as job:
        job.until(lambda: job.events("input_host_joined"), "an input host")
        (folder / "joined").touch()
        assert job.wait() == 0, job.text
        records = [*read_records(job.folder / "audit.jsonl")]
        skipped = job.events("example_skipped")
    assert {each["example"].rpartition(" ")[2] for each in skipped} == {
        f"'k{number:04d}'" for number in DAMAGED
    }
    audit = check_audit(records, finished=True)
    assert audit.ok
    assert audit.skipped == 2 * len(DAMAGED)
    assert (folder / f"read-on-{reads}").exists()
    found = json.loads((folder / "end.json").read_text())
    assert found == pytest.approx(WEIGHT, rel=1e-6)
