from __future__ import annotations

import pytest

from hvd_elastic.cluster.capture import LineSplitter
from hvd_elastic.cluster.commands import select_hosts
from hvd_elastic.cluster.hostfile import parse_hosts
from hvd_elastic.errors import UsageError

HOSTFILE = parse_hosts("gpu[1-4] slots=2\nlogin", "my.hosts")


@pytest.mark.parametrize(
    ("only", "exclude", "names"),
    [
        (None, None, ["gpu1", "gpu2", "gpu3", "gpu4", "login"]),
        ("login,gpu[2-3]", None, ["gpu2", "gpu3", "login"]),
        (None, "gpu[1-4]", ["login"]),
        ("gpu[1-2]", "gpu1", ["gpu2"]),
    ],
)
def test_hosts_are_chosen_in_hostfile_order(
    only: str | None, exclude: str | None, names: list[str]
) -> None:
    assert [host.name for host in select_hosts(HOSTFILE, only, exclude)] == names


@pytest.mark.parametrize(
    ("only", "exclude", "message"),
    [
        ("gpu9", None, r"--hosts: host 'gpu9' is not in my.hosts \(gpu1, "),
        (None, "nobody", "--exclude: host 'nobody'"),
        ("gpu1", "gpu1", "leave no host"),
    ],
)
def test_a_choice_that_cannot_be(only: str | None, exclude: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select_hosts(HOSTFILE, only, exclude)


def test_pieces_become_lines() -> None:
    texts: list[str] = []
    splitter = LineSplitter(texts.append)
    for piece in (b"a", b"b\nc\n", b"", b"\xc3", b"\xbc\n\nend\xff"):
        splitter.feed(piece)
    splitter.finish()
    splitter.finish()
    assert texts == ["ab\nc", "ü\n", "end\ufffd"]
