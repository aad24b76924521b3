from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvd_elastic.errors import RunError
from hvd_elastic.leader.spec import RunSpec, forwarded_environment


def test_workers_get_the_users_variables_and_not_those_of_the_leaders_place() -> None:
    users = {"PATH": "/bin", "LD_LIBRARY_PATH": "/opt", "TOKEN": "x=y\n'z'", "EMPTY": "", "ü": "é"}
    places = {
        "HOME": "/root",
        "USER": "root",
        "PWD": "/",
        "SSH_CONNECTION": "a 1 b 2",
        "_": "x",
        "XDG_RUNTIME_DIR": "/run",
        "TMUX_PANE": "%1",
        "DBUS_SESSION_BUS_ADDRESS": "unix:",
    }
    assert forwarded_environment({**users, **places}) == users


def test_a_leader_that_is_itself_a_rank_does_not_hand_its_ranks_on() -> None:
    ranks = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "8", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h"}
    agent = {"HVD_ELASTIC_AGENT": "x", "HVD_ELASTIC_WORKER": "y"}
    tuned = {"HOROVOD_FUSION_THRESHOLD": "1", "HVD_ELASTIC_HOME": "/h"}
    assert forwarded_environment({**ranks, **agent, **tuned}) == tuned


def test_all_workers_of_a_run_have_one_hash_seed_and_a_resumed_run_has_it_too() -> None:
    spec = RunSpec(("python", "t.py"), "/w")
    first = spec.environment({"A": "b"}, "run-1")
    assert first == {"A": "b", "PYTHONHASHSEED": first["PYTHONHASHSEED"]}
    assert 0 <= int(first["PYTHONHASHSEED"]) < 2**32
    assert first == spec.environment({"A": "b"}, "run-1") != spec.environment({"A": "b"}, "run-2")


def test_the_users_own_hash_seed_is_kept_also_where_a_resumed_run_lacks_it() -> None:
    given = {"PYTHONHASHSEED": "random"}
    assert RunSpec(("p",), "/w").environment(given, "run-1") == given
    spec = RunSpec.from_dict({**RunSpec(("p",), "/w", hash_seed="7").as_dict()}, "run-1")
    assert spec.environment({}, "run-1") == {"PYTHONHASHSEED": "7"}


def test_a_spec_survives_run_json() -> None:
    spec = RunSpec(
        ("python", "a b.py"), "/work", hostfile="hosts", np=4, min_np=2, max_np=8, audit=True
    )
    assert RunSpec.from_dict(json.loads(json.dumps(spec.as_dict())), "r") == spec


def test_what_another_version_wrote_is_still_read() -> None:
    fields = {"command": ["python"], "cwd": "/", "run_id": "r", "of_the_future": 1}
    assert RunSpec.from_dict(fields, "r") == RunSpec(("python",), "/")


@pytest.mark.parametrize("fields", [{}, {"cwd": "/"}, {"command": None, "cwd": "/"}])
def test_a_run_that_never_was_cannot_be_resumed(fields: dict[str, object]) -> None:
    with pytest.raises(RunError, match=r"run r cannot be resumed: its run\.json"):
        RunSpec.from_dict(fields, "r")


def test_the_hostfile_is_found_from_any_folder() -> None:
    assert RunSpec((), "/").hostfile_path is None
    found = RunSpec((), "/", hostfile="hosts").hostfile_path
    assert found == Path.cwd() / "hosts"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", 5),
        ("command", ["python", 1]),
        ("command", []),
        ("cwd", None),
        ("np", "x"),
        ("np", True),
        ("audit", 1),
        ("failure_timeout_s", "5"),
        ("pin_hosts", [None]),
    ],
)
def test_what_is_no_spec_is_refused_by_field(field: str, value: object) -> None:
    fields = {**RunSpec(("python",), "/").as_dict(), field: value}
    with pytest.raises(RunError, match=f"run r cannot be resumed.*another version.*{field}"):
        RunSpec.from_dict(json.loads(json.dumps(fields)), "r")
