"""Requests over the daemon's socket."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from hvd_elastic.errors import RunError, UsageError
from hvd_elastic.jobs.job import Answer, Cancel, Down, Hosts, Request
from hvd_elastic.jobs.place import ClusterFolder, name_of_hostfile, open_cluster
from hvd_elastic.jobs.server import RequestServer, ask_daemon
from tests import other_user
from tests.other_user import open_folder as open_folder
from tests.paths import LIMIT_S


def handle(request: Request, user: int) -> Answer:
    assert user == os.getuid()
    match request:
        case Cancel(jobs, by):
            return Answer(f"{by}: {jobs}", jobs=jobs)
        case Down():
            raise UsageError("not now")
    return Answer("", data=[{"host": "a"}])


@pytest.fixture
def place(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFolder:
    # Longer than the address of a unix socket may be.
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(open_folder / ("long" * 30)))
    return ClusterFolder.create("test")


@pytest.fixture
def server(place: ClusterFolder) -> Iterator[RequestServer]:
    made = RequestServer(place, handle)
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            made.serve(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield made
    over.set()
    thread.join()
    made.close()


def connection(place: ClusterFolder) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(LIMIT_S)
    with place.socket_address() as address:
        made.connect(address)
    return made


def read_all(made: socket.socket) -> Answer:
    received = b"".join(iter(lambda: made.recv(4096), b""))
    return msgspec.json.decode(received, type=Answer)


@pytest.mark.usefixtures("server")
def test_request_and_answer(place: ClusterFolder) -> None:
    many = list(range(50_000))
    answer = ask_daemon(place, Cancel(many, "me"))
    assert answer.jobs == many
    assert ask_daemon(place, Hosts()).data == [{"host": "a"}]


def test_command_that_finds_too_many_others_connecting_tries_again(place: ClusterFolder) -> None:
    made = RequestServer(place, handle)
    others: list[socket.socket] = []
    with place.socket_address() as address, contextlib.suppress(BlockingIOError):
        while len(others) < 1000:
            others.append(socket.socket(socket.AF_UNIX))
            others[-1].setblocking(False)
            others[-1].connect(address)
    assert len(others) < 1000
    answers: list[Answer] = []
    asking = threading.Thread(target=lambda: answers.append(ask_daemon(place, Cancel([1], "me"))))
    asking.start()
    asking.join(0.2)  # it finds the backlog full
    while asking.is_alive():
        made.serve(0.02)
    assert [answer.jobs for answer in answers] == [[1]]
    for other in others:
        other.close()
    made.close()


@pytest.mark.usefixtures("server")
def test_refusal_is_raised_with_its_exit_status(place: ClusterFolder) -> None:
    with pytest.raises(RunError, match="not now") as refused:
        ask_daemon(place, Down(leave_jobs=True))
    assert refused.value.exit_status == 2


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "text", [b"[" * 1_000_000, b"", b"nonsense", b'{"type":"run","command":"sh"}', b"\xff" * 99]
)
def test_invalid_request_is_answered(place: ClusterFolder, text: bytes) -> None:
    with connection(place) as made:
        made.sendall(text)
        made.shutdown(socket.SHUT_WR)
        answer = read_all(made)
    assert not answer.ok
    assert "not valid" in answer.message


@other_user.needs_root
def test_another_user_has_a_few_connections_at_a_time(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_elastic.jobs.server.peer_uid", lambda _: other_user.UID)
    made = RequestServer(place, handle)
    opened = []
    for _ in range(100):
        opened.append(connection(place))
        made.serve(5.0)
    closed = 0
    for each in opened:
        each.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            closed += each.recv(1) == b""
        each.close()
    assert closed == 36, "the oldest make room"
    made.close()


@other_user.needs_root
def test_another_user_is_answered_once_in_a_round(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_elastic.jobs.server.peer_uid", lambda _: other_user.UID)
    monkeypatch.setattr("hvd_elastic.jobs.server.may_use", lambda *_: True)
    asked: list[Request] = []

    def note(request: Request, _user: int) -> Answer:
        asked.append(request)
        return Answer("")

    made = RequestServer(place, note)
    opened = [connection(place) for _ in range(3)]
    for each in opened:
        each.sendall(msgspec.json.encode(Hosts()))
        each.shutdown(socket.SHUT_WR)
    before = 0
    while len(asked) < len(opened):
        made.serve(5.0)
        assert len(asked) <= before + 1
        before = len(asked)
    made.close()
    for each in opened:
        each.close()


@pytest.mark.usefixtures("server")
def test_client_that_sends_nothing_holds_up_nobody(place: ClusterFolder) -> None:
    with connection(place), connection(place) as half:
        half.sendall(b'{"type"')
        assert ask_daemon(place, Hosts()).ok


def test_a_daemon_that_was_stopped_gives_up_no_client_for_it(
    place: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("hvd_elastic.jobs.server.time", clock)
    made = RequestServer(place, handle)
    with connection(place) as asking, connection(place) as silent:
        for _ in range(2):
            made.serve(0.02)
        asking.sendall(msgspec.json.encode(Hosts()))
        asking.shutdown(socket.SHUT_WR)
        now_s += 60.0
        for _ in range(3):
            made.serve(0.02)
        assert read_all(asking).ok
        made.serve(0.02)
        assert silent.recv(1) == b"", "it is given up"
    made.close()


def test_words_that_are_not_utf8_are_refused(place: ClusterFolder) -> None:
    with pytest.raises(UsageError, match=r"'caf\\udce9' is not UTF-8"):
        ask_daemon(place, Cancel([1], "caf\udce9"))


def open_to_all(folder: Path, above: Path) -> None:
    """Let all users enter a folder and those between it and ``above``."""
    for each in (folder, *folder.parents):
        if above in each.parents:
            each.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("opened", [False, True], ids=["as made", "folder and socket opened"])
def test_another_user_is_refused(place: ClusterFolder, open_folder: Path, opened: bool) -> None:
    if opened:  # as by a careless chmod: the daemon still asks the kernel who it is
        open_to_all(place.path, open_folder)
        (place.path / "daemon.sock").chmod(0o666)
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.setgid(65534)
        os.setuid(65534)
        try:
            if opened:
                with connection(place) as made:
                    made.shutdown(socket.SHUT_WR)
                    os.write(write_end, read_all(made).message.encode())
            os.write(write_end, ask_daemon(place, Hosts()).message.encode() or b"answered")
        except (RunError, OSError) as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with open(read_end) as told:  # noqa: PTH123
        said = told.read()
    if opened:
        assert said.startswith("this daemon belongs to another user (id 0); you have id 65534")
        assert said.endswith("Submit from that account, or start a cluster of your own")
    else:
        assert "belongs to another user" in said or "Permission denied" in said


@other_user.needs_root
def test_a_daemon_of_another_user_is_sent_nothing(place: ClusterFolder, open_folder: Path) -> None:
    """As in a folder that they have made in place of this user's."""
    open_to_all(place.path.parent, open_folder)
    os.chown(place.path, other_user.UID, other_user.UID)
    short = open_folder / "short"
    short.symlink_to(place.path)
    with other_user.Holder(str(short / "daemon.sock")) as holder:
        with pytest.raises(RunError, match="daemon of cluster test belongs to another user"):
            ask_daemon(place, Hosts())
        os.chown(place.path, os.getuid(), os.getgid())  # its socket alone is theirs
        with pytest.raises(RunError, match="daemon of cluster test belongs to another user"):
            ask_daemon(place, Hosts())
        assert holder.got() == "nothing"


def test_two_daemons_of_one_cluster(place: ClusterFolder) -> None:
    with place.lock():
        place.describe_daemon(Path("/hosts"))
        assert place.daemon_alive()
        with pytest.raises(RunError, match=rf"has a daemon already \(pid {os.getpid()}"):
            with ClusterFolder(place.path).lock():
                pass
    assert not place.daemon_alive()
    with place.lock():
        pass


def test_without_a_daemon_it_is_said_how_to_start_one(place: ClusterFolder) -> None:
    with pytest.raises(RunError, match="hvd-elastic up HOSTFILE --name test"):
        ask_daemon(place, Hosts())


def test_daemon_that_is_killed_before_it_reads_leaves_open_whether_it_has_done_it(
    place: ClusterFolder,
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        with place.socket_address() as address:
            listener.bind(address)
        listener.listen()

        def die() -> None:
            accepted, _ = listener.accept()
            accepted.recv(1)  # what is left unread is answered by a reset
            accepted.close()

        thread = threading.Thread(target=die)
        thread.start()
        with pytest.raises(RunError, match=r"ended before it answered.*whether it has done"):
            ask_daemon(place, Cancel([1], "me"))
        thread.join()


def test_which_cluster_is_meant(place: ClusterFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_cluster(None).name == "test"
    other = ClusterFolder.create("other")
    with pytest.raises(RunError, match="several clusters: other, test"):
        open_cluster(None)
    with other.lock():
        assert open_cluster(None).name == "other", "the one that is up"
    monkeypatch.setenv("HVD_ELASTIC_CLUSTER", "test")
    assert open_cluster(None).name == place.name
    with pytest.raises(RunError, match="there is no cluster 'mine'"):
        open_cluster("mine")
    assert name_of_hostfile(Path("hosts")) == "hosts"
    with pytest.raises(UsageError, match="cluster name"):
        ClusterFolder.create("../x")
