"""Who fetches what from a shared store, and the lists and commands that a user gives; no IO."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hvd_elastic.errors import UsageError
from hvd_elastic.programs.copy.fetch_command import fill, placeholders, variables
from hvd_elastic.tools.copy.pulling_session import check_pull, read_list
from hvd_elastic.tools.copy.pulling_shares import Shares

HOSTS = ["a", "b", "c"]


def shares(count: int = 9, hosts: list[str] = HOSTS) -> Shares:
    shares = Shares(count)
    shares.assign_all(hosts)
    return shares


def test_what_a_host_fetches_does_not_depend_on_what_is_there_already() -> None:
    assert Shares(6).assign_all(["a", "b"]) == {"a": [0, 2, 4], "b": [1, 3, 5]}
    some = Shares(6)
    some.owners.update({0: "a", 1: "a", 5: "b"})
    assert some.assign_all(["a", "b"]) == {"a": [2, 4], "b": [3]}
    some.disown("a")
    assert some.owners == {5: "b"}
    everything = Shares(2)
    everything.owners.update({0: "a", 1: "b"})
    assert everything.assign_all(["a", "b"]) == {}
    assert everything.finished


def test_what_one_host_cannot_fetch_others_do_that_are_well() -> None:
    some = shares()
    assert some.hear("b", [], [1, 4, 7], "no tool", HOSTS) == {"a": [1, 7], "c": [4]}
    # Nobody gives anything to the host whose command has failed, while there are others.
    assert some.hear("c", [2, 5], [8], "missing", HOSTS) == {"a": [8]}
    assert not some.finished
    assert some.hear("c", [4], [], "", HOSTS) == {}
    assert some.hear("a", [0, 3, 6, 1, 7], [8], "missing here too", HOSTS) == {}
    assert some.finished
    assert some.lost == {8: "missing here too"}
    assert some.failures == {"b": "no tool", "c": "missing", "a": "missing here too"}
    assert some.owners == {0: "a", 3: "a", 6: "a", 1: "a", 7: "a", 2: "c", 5: "c", 4: "c"}


def test_a_host_alone_is_not_asked_twice() -> None:
    some = shares(2, ["a"])
    assert some.hear("a", [0], [1], "missing", ["a"]) == {}
    assert some.lost == {1: "missing"}


def test_a_host_that_is_lost_takes_what_it_had_with_it() -> None:
    some = shares()
    some.hear("a", [0, 3], [], "", HOSTS)
    assert some.lose("a", ["b", "c"]) == {"b": [0, 6], "c": [3]}
    assert some.lose("c", ["b"]) == {"b": [2, 3, 5, 8]}
    some.hear("b", [0, 6, 1, 4, 7, 2, 3, 5, 8], [], "", ["b"])
    assert some.finished
    assert some.lose("b", []) == {}
    assert len(some.lost) == 9


def test_lists() -> None:
    data = b"./a/b\n\n12\tc d\r\nfolder/\n2020 report\nx\ty\n\xff\n"
    assert read_list(data) == (
        ("a/b", None),
        ("c d", 12),
        ("2020 report", None),
        ("x\ty", None),
        ("\udcff", None),
    )
    assert read_list(b"a/1\nb/2.tmp", ["*.tmp"]) == (("a/1", None),)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\n../b", "line 2: the path '../b' would leave"),
        (b"/a", "line 1"),
        (b"5\t.hvd_elastic-pull/x", "line 1"),
        (b"a\na/b", "a cannot be a file, since a/b is below it"),
        (b"\n", "there is no file in it"),
    ],
)
def test_lists_that_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_list(data)


@pytest.mark.parametrize(
    ("command", "listed", "message"),
    [
        ("aws s3 sync s3://b/set .", False, "put {dst} there"),
        ("cp ${dst}", False, "put {dst} there"),
        ("rclone copy far:set {dst}", True, "{path} .* or {list}"),
        ("cp {path} {list} {dst}", True, "not both"),
        ("cp /far/{path} {dst}", False, "for {path} say which files"),
        ("cat <<'E' >{dst}/a\n{path}\nE\n", True, "{path} stays as it is in a here-document"),
        ("cat <<-\\E; ls {dst}\n{path}\n\tE", True, "variable hvd_path there"),
    ],
)
def test_commands_that_are_refused(command: str, listed: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_pull(command, listed)


def test_commands_that_are_fine() -> None:
    check_pull("aws s3 sync s3://b/set {dst}", listed=False)
    check_pull("awk '{print $1}' {list} | xargs -I% cp /far/% {dst}/%", listed=True)
    assert placeholders("a {path} \\{dst} {other} ${list}") == ["path"]


@pytest.mark.parametrize("command", ['cp /set/{path} "$(dirname {dst}/{path})"', ": `{path}`"])
@pytest.mark.parametrize(
    "value", ["a;touch PWN;/b", "$(touch PWN)", "`touch PWN`", "'\"; touch PWN"]
)
def test_no_name_of_a_list_is_run_by_the_shell(tmp_path: Path, command: str, value: str) -> None:
    values = {"path": value, "dst": "/none"}
    environment = {**os.environ, **variables(values)}
    subprocess.run(["sh", "-c", fill(command, values)], env=environment, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["plain", "it's $1", 'a"b`c`\\d $(x)', "two words", "-x", "a\nb"])
@pytest.mark.parametrize(
    ("command", "before"),
    [
        ("printf %s {path}", ""),
        ("printf %s '{path}'", ""),
        ('printf %s "{path}"', ""),
        ("printf %s ''\"\"\\'{path}", "'"),
        ("printf %s '\\'{path}", "\\"),
        ('printf %s "$(printf %s {path})"', ""),
        ('printf %s "$( (printf %s "{path}") )"', ""),
        ('printf %s "`printf %s {path}`"', ""),
        ('printf %s "`printf %s "{path}"`"', ""),
        ("printf %s \"$(printf %s '{path}')\"", ""),
        ('printf %s "(a"; printf %s {path}', "(a"),
        ('(printf %s "$(printf %s a)"; printf %s {path})', "a"),
    ],
)
def test_the_shell_gets_a_value_as_it_is_wherever_it_stands(
    command: str, before: str, value: str
) -> None:
    values = {"path": value}
    environment = {**os.environ, **variables(values)}
    done = subprocess.run(["sh", "-c", fill(command, values)], env=environment, capture_output=True)
    assert done.stdout.decode() == before + value


@pytest.mark.parametrize("value", ["plain", "it's $1", 'a"b`c`\\d $(x)', "two  words"])
@pytest.mark.parametrize(
    "command",
    [
        "cat <<E\n{path}\nE\n",
        "cat <<-E\n\t{path}\n\tE",
        "cat <<E\n$(printf %s {path})\nE",
        "cat <<A >/dev/null; cat <<B\nit's \"{path}\nA\n{path}\nB\n",
        "cat <<E >/dev/null\nit's {path}\nE\nprintf '%s\\n' {path}",
        "cat <<'E' >/dev/null\nit's\nE\nprintf '%s\\n' {path}",
        "true $((1<<2))\nprintf '%s\\n' {path}",
        "printf '%s\\n' \"$(cat <<E\n{path}\nE\n)\"",
    ],
)
def test_the_shell_gets_a_value_as_it_is_in_and_after_a_here_document(
    command: str, value: str
) -> None:
    values = {"path": value}
    environment = {**os.environ, **variables(values)}
    done = subprocess.run(["sh", "-c", fill(command, values)], env=environment, capture_output=True)
    assert done.stdout.decode() == f"{value}\n"
