"""The command that is told of events."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socketserver
import threading
import time
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from hvd_elastic.jobs import notify
from hvd_elastic.jobs.job import Cancel, Hold, JobKind, JobRequest, JobStatus, Submit
from hvd_elastic.jobs.notify import Notifier, NotifyCommand
from hvd_elastic.jobs.place import ClusterFolder
from hvd_elastic.jobs.server import ask_daemon
from tests.paths import LIMIT_S, ROOT
from tests.unit.jobs import test_daemon
from tests.unit.jobs.test_daemon import Running, hosts, submit

place = test_daemon.place
EVENT = {"kind": "job_finished", "job": 1}


def work_until(notifier: Notifier, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        notifier.work()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_events_come_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no space of a disk."""
    monkeypatch.setattr("tempfile.tempdir", "/no such folder")
    monkeypatch.setattr(notify, "_LAST_S", LIMIT_S)
    told = tmp_path / "it's told"
    warnings: list[str] = []
    notifier = Notifier(warnings.append)
    command = NotifyCommand(f"cat >> {shlex.quote(str(told))}")
    for number in range(5):
        notifier.tell(command, {**EVENT, "job": number, "message": "a\n$(touch x)"})
        notifier.tell(command, {"kind": "jobs_decided"})
    notifier.close()
    events = [json.loads(line) for line in told.read_text().splitlines()]
    assert [event["job"] for event in events] == [0, 1, 2, 3, 4]
    assert events[0]["message"] == "a\n$(touch x)"
    assert warnings == []


def test_command_that_hangs_floods_or_fails_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    last = tmp_path / "last"
    text = "case $(cat) in *hang*) sleep 1000 & wait;; *flood*) yes;; *fail*) exit 3;; esac"
    notifier = Notifier(warnings.append)
    command = NotifyCommand(f"{text}; touch {shlex.quote(str(last))}")
    with monkeypatch.context() as hurried:
        hurried.setattr(notify, "_LIMIT_S", 0.2)
        for what in ("hang", "flood"):
            notifier.tell(command, {**EVENT, "message": what})
        work_until(notifier, lambda: len(warnings) == 2)
    assert warnings == ["--notify: the command did not end within 0.2 s: killed"] * 2
    for what in ("fail", "none"):
        notifier.tell(command, {**EVENT, "message": what})
    work_until(notifier, last.exists)
    assert warnings[2:] == ["--notify: the command ended with exit status 3"]
    monkeypatch.setattr(notify, "_LAST_S", 0.1)
    for number in range(notify._MOST_WAITING + 5):
        notifier.tell(command, {**EVENT, "message": "hang", "job": number})
    assert warnings[-1] == "--notify: 1000 events wait to be told, so others are dropped"
    notifier.close()


def test_daemon_tells_of_its_jobs(
    place: ClusterFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_LAST_S", LIMIT_S)
    told = tmp_path / "told"
    daemon = Running(place, hosts(place), notify=f"cat >> {shlex.quote(str(told))}")
    number = submit(place)
    daemon.until(lambda: test_daemon.leads(daemon, number))
    ask_daemon(place, Cancel([number], "ann"))
    daemon.until(told.exists)
    daemon.down(leave_jobs=True)
    event = json.loads(told.read_text().splitlines()[0])
    assert event["run_id"] == daemon.job(number).run_id
    assert {key: event[key] for key in ("cluster", "kind", "job", "status", "message")} == {
        "cluster": "test",
        "kind": "job_finished",
        "job": number,
        "status": "cancelled",
        "message": "cancelled by ann",
    }


def test_user_is_told_of_a_job_in_its_folder_and_environment(
    place: ClusterFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of its end, at which its environment is removed from the queue."""
    monkeypatch.setattr(notify, "_LAST_S", LIMIT_S)
    folder = tmp_path / "of the job"
    folder.mkdir()
    daemon = Running(place, hosts(place))
    spec = {"command": ["train"], "cwd": str(folder), "notify": "cat >> $TOLD.jsonl"}
    request = JobRequest("train", spec, kind=JobKind.FIXED, max_np=1, notify=True)
    environment = {"TOLD": "mine", "PATH": os.environ["PATH"]}
    (number,) = ask_daemon(place, Submit([request], environment)).jobs
    daemon.until(lambda: test_daemon.leads(daemon, number))
    ask_daemon(place, Hold([number], "ann"))
    daemon.until(lambda: daemon.job(number).status is JobStatus.QUEUED)
    ask_daemon(place, Cancel([number], "ann"))
    daemon.down(leave_jobs=True)
    events = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["job_requeued", "job_finished"]
    assert events[1]["message"] == "cancelled by ann"
    assert {event["run_id"] for event in events} == {daemon.job(number).run_id}


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs jq and curl")
def test_recipes_for_mail_and_chat_tell_of_an_event(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    recipes = re.findall(r"```sh\n(#!/bin/sh\n.*?)```", page, re.DOTALL)
    with MailServer() as mail, ChatServer() as chat:
        for name, text in zip(("mail.sh", "chat.sh"), recipes, strict=True):
            path = tmp_path / name
            path.write_text(text.replace("smtp://mail.example.org", mail.url))
            path.chmod(0o755)
        variables = {**os.environ, "USER": "ann", "CHAT_HOOK": chat.url}
        warnings: list[str] = []
        notifier = Notifier(warnings.append)
        event = {**EVENT, "name": "resnet", "status": "failed", "message": 'no "space" left'}
        for name in ("mail.sh", "chat.sh"):
            notifier.tell(NotifyCommand(f"./{name}", variables, str(tmp_path)), event)
        work_until(notifier, lambda: not notifier.is_busy)
    assert warnings == []
    assert "RCPT TO:<ann@example.org>" in mail.heard
    told = "\r\n".join(mail.heard)
    assert 'Subject: job_finished resnet\r\n\r\nfailed no "space" left\r\n' in told
    assert json.loads(mail.heard[-3]) == event
    assert chat.heard == [{"text": 'job_finished resnet failed no "space" left'}]


class Server:
    """Serves connections on this machine one after the other, while a ``with`` block runs."""

    scheme = ""

    def __enter__(self) -> Self:
        self.heard: list[Any] = []
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                outer.serve(self.rfile, self.wfile)

        self._server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
        self.url = f"{self.scheme}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self, lines: BufferedIOBase, answer: BufferedIOBase) -> None:
        raise NotImplementedError


class MailServer(Server):
    scheme = "smtp"

    def serve(self, lines: BufferedIOBase, answer: BufferedIOBase) -> None:
        answer.write(b"220 mail\r\n")
        in_text = False
        for line in lines:
            self.heard.append(line.decode().rstrip("\r\n"))
            in_text = (in_text and line != b".\r\n") or line == b"DATA\r\n"
            if line == b"DATA\r\n":
                answer.write(b"354 go on\r\n")
            elif not in_text:
                answer.write(b"250 ok\r\n")


class ChatServer(Server):
    scheme = "http"

    def serve(self, lines: BufferedIOBase, answer: BufferedIOBase) -> None:
        headers = list(iter(lines.readline, b"\r\n"))
        (size,) = (int(each.split()[1]) for each in headers if each.startswith(b"Content-Length"))
        self.heard.append(json.loads(lines.read(size)))
        answer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
