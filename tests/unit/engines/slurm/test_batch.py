"""Options of ``slurm submit`` and the batch scripts that they make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_elastic.cli.engines.slurm_options import check_submission, parse_nodes
from hvd_elastic.engines.slurm.batch import Submission, parse_time
from hvd_elastic.errors import UsageError

RECORDED = Path(__file__).with_name("recorded_scripts.txt")
SUBMISSION = Submission(
    run_id="resnet",
    least=2,
    most=8,
    folder="/home/ann/.hvd_elastic/runs/resnet/slurm",
    cwd="/home/ann/my work",
    python="/home/ann/venv/bin/python",
    home="/home/ann/.hvd_elastic",
    slots_per_node=4,
    time="4:00:00",
    partition="gpu",
    sbatch=("--gpus-per-node=4", "--account=vision"),
)


def test_the_batch_scripts_are_those_recorded() -> None:
    made = f"{SUBMISSION.first()}\n{SUBMISSION.further()}"
    assert made == RECORDED.read_text("utf-8"), (
        f"if the change is meant, write the new scripts to {RECORDED.name}:\n{made}"
    )


def test_a_script_leaves_out_what_the_user_has_not_asked_for() -> None:
    plain = replace(SUBMISSION, time=None, partition=None, sbatch=())
    assert "--time" not in plain.first() + plain.further()
    assert "--partition" not in plain.first() + plain.further()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8-2", r"Did you mean --nodes 2-8\?"),
        ("0", "at least 1 node"),
        ("", "such as 2-8"),
        ("2:8", "such as 2-8"),
        ("-3", "such as 2-8"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sbatch": ("--array=1-3",)}, "would lead the same run"),
        ({"sbatch": ("-a1-3",)}, "would lead the same run"),
        ({"sbatch": ("-Ha1-3",)}, "would lead the same run"),
        ({"sbatch": ("--arr=1-3",)}, "would lead the same run"),
        ({"sbatch": ("account=vision",)}, "as one word"),
        ({"sbatch": ("--account=vision --qos=high",)}, "a --sbatch of its own"),
        ({"sbatch": ("--nodes=4",)}, "set by --nodes"),
        ({"sbatch": ("-N4",)}, "set by --nodes"),
        ({"sbatch": ("-t 10",)}, "set by --time"),
        ({"sbatch": ("--wait",)}, "continues in others"),
        ({"sbatch": ("-V",)}, "submits nothing"),
        ({"sbatch": ("-G4",)}, "Say how many each node has"),
        ({"sbatch": ("-x", "./bad")}, "no option of sbatch"),
        ({"sbatch": ("-x./bad",)}, "names a file"),
        ({"sbatch": ("--nodelist=gpu[1",)}, "gpu\\[1"),
        ({"sbatch": ("-wgpu[1-9]",)}, "names 9 nodes"),
        ({"cwd": "/home/ann/a\nb"}, "has a line break"),
        ({"folder": "/home/ann/a\\b"}, "because of the backslash"),
        ({"sbatch": ("--signal=USR2@30",)}, "set by --leave-before"),
        ({"time": "soon"}, "no time of Slurm"),
        ({"time": "2:59"}, "Give at least 3 minutes"),
        ({"time": "5", "leave_before_s": 400}, "Give at least 8 minutes"),
    ],
)
def test_options_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_submission(replace(SUBMISSION, **changes))


def test_odd_names_reach_sbatch_as_they_are() -> None:
    odd = replace(
        SUBMISSION,
        folder="/a#b/50%j",
        sbatch=('--comment=a "b" c', "-x gpu7", "-wgpu[1-4]", "-d singleton"),
    )
    assert odd.once == ["--dependency=singleton"]
    first, further = odd.first().splitlines(), odd.further().splitlines()
    assert {'#SBATCH --output="/a#b/50%%j/slurm-%j.log"', "#SBATCH --exclude=gpu7"} <= {*first}
    assert "#SBATCH --nodelist=gpu1,gpu2" in first
    assert '#SBATCH --comment="a \\"b\\" c"' in further
    assert not [line for line in further if "nodelist" in line or "singleton" in line]


@pytest.mark.parametrize("time", [None, "3", "3:00", "1-0", "0:03:00", "UNLIMITED", "infinite"])
def test_times_that_suffice_are_taken(time: str | None) -> None:
    check_submission(replace(SUBMISSION, time=time))


@pytest.mark.parametrize("text", ["", "1:2:3:4", "1d", "UNLIMITED", "-1", "1-"])
def test_what_is_no_time_has_no_seconds(text: str) -> None:
    assert parse_time(text) is None
