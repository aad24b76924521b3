"""What a script that ended badly is said to be; no processes."""

from __future__ import annotations

import pytest

from hvd_elastic.control.endings import explain_script_error

SITE = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
NO_GROUP = "ValueError: Default process group has not been initialized, please make sure to call"


def traceback(*frames: tuple[str, int] | tuple[str, int, str], error: str) -> str:
    lines = [
        f'  File "{file}", line {line}, in {"".join(function) or "<module>"}\n    code'
        for file, line, *function in frames
    ]
    return "\n".join(["Traceback (most recent call last):", *lines, error, ""])


@pytest.mark.parametrize(
    ("text", "begins", "holds"),
    [
        (
            traceback(
                ("t.py", 3),
                ("net.py", 9),
                (f"{SITE}/x.py", 1, "_get_default_group"),
                error=NO_GROUP,
            ),
            "net.py, line 9: this expects the process group of torchrun; remove",
            "hvd.DistributedOptimizer(optimizer, model)",
        ),
        (
            traceback(("t.py", 5), (f"{SITE}/fsdp/_init_utils.py", 8, "_init"), error=NO_GROUP),
            "t.py, line 5: this expects the process group of torchrun, and nothing here shards",
            "keep torchrun for a model that needs more than one device",
        ),
        (
            traceback(("t.py", 2), ("<frozen os>", 679), error="KeyError: 'LOCAL_RANK'"),
            "t.py, line 2: this expects",
            "hvd.local_rank()",
        ),
        (
            traceback(
                ("t.py", 4),
                ("/opt/venv/lib/python3.11/site-packages/torch/utils/data/distributed.py", 77),
                (f"{SITE}/distributed_c10d.py", 1, "_get_default_group"),
                error=NO_GROUP,
            ),
            "t.py, line 4: this DistributedSampler expects the process group of torchrun; leave",
            "hvd.DataLoader(dataset, batch_size, shuffle=True)",
        ),
    ],
)
def test_a_script_that_expects_torchrun(text: str, begins: str, holds: str) -> None:
    explained = explain_script_error(text)
    assert explained is not None
    assert explained.startswith(begins)
    assert holds in explained


def test_other_errors_of_torch_distributed_are_not_explained() -> None:
    error = "RuntimeError: Connection closed by peer"
    text = traceback(("t.py", 3), (f"{SITE}/distributed_c10d.py", 7, "all_reduce"), error=error)
    assert explain_script_error(text) is None


@pytest.mark.parametrize("error", ["KeyError: 'rank'", "ValueError: RANK", "OSError: [Errno 5]"])
def test_other_errors_are_not_explained(error: str) -> None:
    assert explain_script_error(traceback(("t.py", 1), error=error)) is None
