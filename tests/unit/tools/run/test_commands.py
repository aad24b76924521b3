from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_elastic.errors import UsageError
from hvd_elastic.hosts.connection import SshOptions
from hvd_elastic.hosts.fanout import Stopper
from hvd_elastic.hosts.hostfile import Host, parse_hosts
from hvd_elastic.tools.run.capture import LONGEST_LINE_BYTES, Capture, TextLines
from hvd_elastic.tools.run.commands import (
    CommandResult,
    CommandSettings,
    _assess,
    _Task,
    select_hosts,
)

HOSTFILE = parse_hosts("gpu[1-2] slots=2\ngpu[3-4] labels=spot,a100\nlogin", "my.hosts")


@pytest.mark.parametrize(
    ("only", "exclude", "names"),
    [
        (None, None, ["gpu1", "gpu2", "gpu3", "gpu4", "login"]),
        ("login,gpu[2-3]", None, ["gpu2", "gpu3", "login"]),
        (None, "gpu[1-4]", ["login"]),
        ("gpu[1-2]", "gpu1", ["gpu2"]),
        ("@spot,login", None, ["gpu3", "gpu4", "login"]),
        (None, "@a100,gpu1", ["gpu2", "login"]),
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
        (None, "nobody", "--exclude-hosts: host 'nobody'"),
        ("gpu1", "gpu1", "leave no host"),
        ("@h100", None, "--hosts: no host of my.hosts has the label 'h100'; .* spot, a100"),
        ("@", None, "--hosts: no host of my.hosts has the label ''"),
    ],
)
def test_a_choice_that_cannot_be(only: str | None, exclude: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select_hosts(HOSTFILE, only, exclude)


def test_pieces_become_lines() -> None:
    texts: list[str] = []
    splitter = TextLines(texts.append)
    for piece in (b"a", b"b\nc\n", b"", b"\xc3", b"\xbc\n\nend\xff"):
        splitter.feed(piece)
    splitter.finish()
    splitter.finish()
    assert texts == ["ab\nc", "ü\n", "end\udcff"]


@pytest.mark.parametrize("character", ["ü", "字", "🙂"])
@pytest.mark.parametrize("before", range(4))
def test_no_character_of_a_long_output_is_cut(character: str, before: int) -> None:
    text = "." * before + character * LONGEST_LINE_BYTES
    texts: list[str] = []
    capture = Capture(LONGEST_LINE_BYTES, texts.append)
    for at in range(0, len(text.encode()), 50_000):
        capture.take_piece(text.encode()[at : at + 50_000])
    capture.finish()
    assert "".join(texts) == text
    assert text.startswith(capture.kept.decode())
    assert LONGEST_LINE_BYTES - 4 < len(capture.kept) <= LONGEST_LINE_BYTES


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exit status 3"),
        (126, "exit status 126 (cannot be executed)"),
        (127, "exit status 127 (command not found)"),
        (139, "exit status 139 (signal 11)"),
        (255, "exit status 255"),
        (-1, "the command was killed by a signal"),
    ],
)
def test_what_a_status_means(status: int, words: str) -> None:
    assert _assess(CommandResult(status, b"", b"", 1.0), CommandSettings())[1] == words


@pytest.mark.parametrize(
    ("timeout_s", "total_s", "words"),
    [
        (0.2, None, "within 0.2 s and was stopped. Give it more time with --timeout"),
        (90.0, 0.1, "within 0.1 s and was stopped. Give it more time with --total-timeout"),
        (0.2, 90.0, "within 0.2 s and was stopped. Give it more time with --timeout"),
    ],
)
def test_the_limit_that_ended_it_is_named(
    timeout_s: float, total_s: float | None, words: str
) -> None:
    settings = CommandSettings(timeout_s=timeout_s, total_timeout_s=total_s)
    assert _ended_in_words(settings) == f"did not end {words}"


def test_the_time_of_all_hosts_ends_one_that_began_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Task, "_time_left", lambda *_: 0.1)
    settings = CommandSettings(timeout_s=10.0, total_timeout_s=60.0)
    words = "within 60 s and was stopped. Give it more time with --total-timeout"
    assert _ended_in_words(settings) == f"did not end {words}"


def _ended_in_words(settings: CommandSettings) -> str:
    """How the end of a command that hangs is told."""
    task = _Task("sleep 600", SshOptions(), settings, None, {}, None)
    running: Any = SimpleNamespace(
        end_input=lambda: None, wait=_time_out, stop=lambda: True, close=lambda: None
    )
    captures: Any = ()
    status, stopped, limit = task._wait(Host("a"), running, Stopper(), captures)
    assert status is None
    return _assess(CommandResult(-1, b"", b"", 1.0, stopped=stopped, limit=limit), settings)[1]


def _time_out(_limit_s: float) -> int:
    raise TimeoutError
