from __future__ import annotations

from hvd_elastic.hosts.hostfile import Host
from hvd_elastic.leader.mpi import mpirun_command
from hvd_elastic.leader.spec import RunSpec

HOSTS = [Host("a", slots=2), Host("b", slots=4)]


def command(spec: RunSpec, *, root: bool = False) -> list[str]:
    return mpirun_command(spec, HOSTS, "/t/hosts", ["PATH", "TOKEN"], root=root)


def following(words: list[str], flag: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == flag]


def test_variables_are_named_and_their_values_are_not_there() -> None:
    words = command(RunSpec(("python", "t.py"), "/w"))
    assert following(words, "-x") == ["PATH", "TOKEN"]
    assert not any("=" in name for name in following(words, "-x"))


def test_all_slots_unless_fewer_are_wanted() -> None:
    assert following(command(RunSpec(("p",), "/w")), "-np") == ["6"]
    assert following(command(RunSpec(("p",), "/w", np=3)), "-np") == ["3"]


def test_the_training_command_comes_last_and_untouched() -> None:
    words = command(RunSpec(("python", "a b.py", "-np", "$X"), "/w"))
    assert words[-4:] == ["python", "a b.py", "-np", "$X"]
    assert following(words, "--wdir") == ["/w"]


def test_ssh_asks_nothing_and_checks_host_keys() -> None:
    words = " ".join(command(RunSpec(("p",), "/w", ssh_config="/my config")))
    assert "ssh -o BatchMode=yes -F '/my config'" in words
    assert "StrictHostKeyChecking" not in words


def test_root_and_the_interface_are_told_only_where_they_are() -> None:
    plain = command(RunSpec(("p",), "/w"))
    assert "--allow-run-as-root" not in plain
    assert "btl_tcp_if_include" not in plain
    told = command(RunSpec(("p",), "/w", interface="eth1"), root=True)
    assert "--allow-run-as-root" in told
    assert (
        following(told, "btl_tcp_if_include") == following(told, "oob_tcp_if_include") == ["eth1"]
    )
