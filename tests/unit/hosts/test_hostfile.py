from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_elastic.errors import HostfileError
from hvd_elastic.hosts.hostfile import (
    Host,
    expand_hosts,
    fold_hosts,
    format_hostfile,
    parse_hostfile,
    parse_hosts,
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gpu1", Host("gpu1")),
        ("gpu1 slots=8", Host("gpu1", slots=8)),
        ("gpu1\tslots = 8", Host("gpu1", slots=8)),
        ("gpu1:8", Host("gpu1", slots=8)),
        ("gpu1 max_slots=4", Host("gpu1", max_slots=4)),
        ("gpu1 slots=2 max-slots=4", Host("gpu1", slots=2, max_slots=4)),
        ("alice@gpu1:2 port=2222", Host("gpu1", slots=2, user="alice", port=2222)),
        (
            "gpu1 cpus=64 price=2.50 labels=spot,a100  # cheap",
            Host("gpu1", cpus=64, price=2.5, labels=("spot", "a100")),
        ),
        ("localhost", Host("localhost")),
        ("127.0.0.1 slots=2", Host("127.0.0.1", slots=2)),
        ("::1", Host("::1")),
        ("bob@[fe80::1%eth0]:4", Host("fe80::1%eth0", slots=4, user="bob")),
        ("  gpu-1.example.com slots=1 \r", Host("gpu-1.example.com")),
    ],
)
def test_each_form_of_a_line(line: str, expected: Host) -> None:
    assert parse_hosts(line, "h").hosts == (expected,)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[1-3,7]", ["gpu1", "gpu2", "gpu3", "gpu7"]),
        ("gpu[98-101]", ["gpu98", "gpu99", "gpu100", "gpu101"]),
        ("r[1-2]n[01-02].x", ["r1n01.x", "r1n02.x", "r2n01.x", "r2n02.x"]),
        ("n[0-8/4]", ["n0", "n4", "n8"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_ranges(pattern: str, names: list[str]) -> None:
    hosts = parse_hosts(f"{pattern} slots=3", "h").hosts
    assert [host.name for host in hosts] == names
    assert {host.slots for host in hosts} == {3}
    assert list(expand_hosts(pattern)) == names


def test_order_comments_and_blank_lines() -> None:
    hostfile = parse_hosts("\n# all\nz slots=1\n\n  \na:2 # last\n", "h")
    assert hostfile.names == ("z", "a")
    assert hostfile.slots == 3
    assert len(hostfile) == 2
    assert hostfile.get("A") == Host("a", slots=2)
    assert hostfile.get("b") is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("-oProxyCommand=id", ["line 1", "column 1", "begins with '-'"]),
        ("a\nroot@-x", ["line 2", "column 6", "begins with '-'"]),
        ("a slots=0", ["column 9", "slots is 0"]),
        ("a slots=0 labels=spot", ["column 9", "labels=input"]),
        ("a slots=-1", ["'-1'"]),
        ("a slots=two", ["whole number", "'two'"]),
        ("a slots=", ["whole number", "''"]),
        ("a:0", ["column 3", "slots is 0"]),
        ("a:x", ["'x'"]),
        ("a:22 slots=2", ["column 6", "port=2222"]),
        ("a slot=2", ["unknown attribute 'slot'", "valid: slots, max_slots"]),
        ("a slots=1 slots=2", ["given twice"]),
        ("a slots=4 max_slots=2", ["column 11", "max_slots=2 is below"]),
        ("a 4", ["'4' is no attribute"]),
        ("slots=4", ["where the host name should"]),
        ("a b", ["one host a line"]),
        ("a,b", ["','"]),
        ("gpu[1-x]", ["column 5", "'1-x'"]),
        ("gpu[3-1]", ["runs backwards"]),
        ("gpu[1-3", ["column 4", "unbalanced"]),
        ("gpu1-3]", ["column 7", "unbalanced"]),
        ("gpu[]", ["''"]),
        ("gpu[1-007]", ["same width"]),
        ("gpu[1-999999999]", ["more than 65536"]),
        ("r[1-1000]n[1-1000]", ["more than 65536"]),
        ("a[1-65536]\nb", ["line 2", "more than 65536 hosts"]),
        ("a$(id)", ["'$'"]),
        ("a;id", ["';'"]),
        ("bücher", ["'ü'"]),
        ("a port=70000", ["port is 70000"]),
        ("a price=nan", ["number >= 0"]),
        ("a price=-1", ["number >= 0"]),
        ("a labels=x,,y", ["column 12", "no label"]),
        ("a:b:c", ["IPv6"]),
        ("@a", ["user name"]),
        ("alice@corp@gpu1", ["user name"]),
        ("bob@", ["no host name"]),
        ("a\nb\nA slots=2", ["line 3", "line 1", "('a')", "already"]),
        ("gpu3 slots=1\ngpu[1-4]", ["line 2", "'gpu3'", "line 1"]),
        ("", ["names no host"]),
        ("# nothing\n\n", ["names no host"]),
    ],
)
def test_errors_name_place_text_and_valid_forms(text: str, parts: list[str]) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hosts(text, "my.hosts")
    message = str(caught.value)
    for part in ["my.hosts", "valid lines:", *parts]:
        assert part in message


def test_the_mark_stands_under_the_offending_part() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hosts("ok\n gpu1 slotz=3 # x\n", "f")
    lines = str(caught.value).splitlines()
    assert lines[1] == "     gpu1 slotz=3 # x"
    assert lines[1][lines[2].index("^") :].startswith("slotz")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match="does not exist"):
        parse_hostfile(tmp_path / "none")
    with pytest.raises(HostfileError, match="folder"):
        parse_hostfile(tmp_path)
    (tmp_path / "latin").write_bytes(b"ok\nb\xfccher\n")
    with pytest.raises(HostfileError, match=r"line 2: byte 0xfc"):
        parse_hostfile(tmp_path / "latin")
    (tmp_path / "empty").touch()
    with pytest.raises(HostfileError, match="empty names no host"):
        parse_hostfile(tmp_path / "empty")


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "h"
    path.write_bytes(b"\xef\xbb\xbfa:2\r\nb\r\n")
    assert parse_hostfile(path).hosts == (Host("a", slots=2), Host("b"))


def test_a_host_cannot_be_made_wrong() -> None:
    with pytest.raises(ValueError, match="host name '-x'"):
        Host("-x")
    with pytest.raises(ValueError, match="host name 'a b'"):
        Host("a b")
    with pytest.raises(ValueError, match="slots=0 of host a"):
        Host("a", slots=0)
    with pytest.raises(ValueError, match="max_slots=2 of host a is below its 3"):
        Host("a", slots=3, max_slots=2)
    with pytest.raises(ValueError, match="user '-l'"):
        Host("a", user="-l")
    with pytest.raises(ValueError, match="price=inf"):
        Host("a", price=float("inf"))
    with pytest.raises(ValueError, match="label 'x y'"):
        Host("a", labels=("x y",))


_names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,12}", fullmatch=True) | st.ip_addresses().map(
    str
)
_counts = st.integers(1, 64)


@st.composite
def _hosts(draw: st.DrawFn) -> Host:
    slots = draw(_counts)
    return Host(
        name=draw(_names),
        slots=slots,
        user=draw(st.none() | st.from_regex(r"[a-z_][a-z0-9_.+-]{0,8}", fullmatch=True)),
        port=draw(st.none() | st.integers(1, 65_535)),
        max_slots=draw(st.none() | st.integers(slots, 128)),
        cpus=draw(st.none() | _counts),
        price=draw(st.none() | st.floats(0, 1e9)),
        labels=tuple(
            draw(
                st.lists(
                    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,6}", fullmatch=True),
                    max_size=3,
                    unique=True,
                )
            )
        ),
    )


@given(st.lists(_hosts(), min_size=1, max_size=6, unique_by=lambda host: host.name.lower()))
def test_what_is_written_is_read_back(hosts: list[Host]) -> None:
    assert parse_hosts(format_hostfile(hosts), "h").hosts == tuple(hosts)


@given(st.text(max_size=60) | st.text(alphabet="ab1[]-,:@= \t\n#slot", max_size=60))
def test_any_text_is_read_or_refused_with_a_hostfile_error(text: str) -> None:
    try:
        hostfile = parse_hosts(text, "h")
    except HostfileError:
        return
    assert parse_hosts(format_hostfile(hostfile), "h").hosts == hostfile.hosts


@given(st.lists(st.from_regex(r"[a-c]{1,2}[0-9]{0,3}([.][a-b]?[0-9]{0,2}c)?", fullmatch=True)))
def test_folded_names_unfold_to_the_same_set(names: list[str]) -> None:
    folded = fold_hosts(names)
    assert (set(expand_hosts(folded)) if names else set()) == set(names)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["gpu01", "gpu02", "gpu03", "gpu04"], "gpu[01-04]"),
        (["gpu08", "gpu09", "gpu10"], "gpu[08-10]"),
        (["gpu4", "gpu1", "gpu2"], "gpu[1-2,4]"),
        (["b", "a", "b"], "b,a"),
        (["n1", "n01"], "n1,n01"),
        (["10.0.0.1", "10.0.0.2", "::1"], "10.0.0.[1-2],::1"),
        ([], ""),
    ],
)
def test_fold(names: list[str], folded: str) -> None:
    assert fold_hosts(names) == folded


@pytest.mark.parametrize("text", ["", " , ", "a[1", "a b", "-x"])
def test_host_lists_that_cannot_be_read(text: str) -> None:
    with pytest.raises(HostfileError, match="host list"):
        expand_hosts(text)


EXAMPLES = sorted((Path(__file__).parents[3] / "hostfiles").glob("*.hostfile"))


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        "one-machine",
        "four-nodes",
        "mixed-cpu-gpu",
        "ranges",
        "priced-spot",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_can_be_read(path: Path) -> None:
    hostfile = parse_hostfile(path)
    assert hostfile.slots >= len(hostfile) >= 1
    assert path.read_text().startswith("#"), "an example begins with a comment that explains it"


def test_a_host_that_only_reads_has_no_slots() -> None:
    found = parse_hosts("a slots=2\ncpu[1-2] slots=0 cpus=16 labels=input,spot\n", "hosts")
    assert [(host.name, host.slots) for host in found] == [("a", 2), ("cpu1", 0), ("cpu2", 0)]
    assert found.slots == 2
    assert parse_hosts(format_hostfile(found), "again").hosts == found.hosts
