"""What a preemption command prints, as the large clouds do."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hvd_elastic.agent.preemption import NOTICE_S, seconds_left

NOW = 1_790_000_000.0  # 2026-09-21T14:13:20Z
COMMANDS = Path(__file__).resolve().parents[3] / "docs" / "commands.md"


@pytest.mark.parametrize(
    ("output", "seconds"),
    [
        ('{"action": "terminate", "time": "2026-09-21T14:15:20Z"}', 120.0),
        ('{"EventId": "A", "NotBefore": "2026-09-21T14:13:50+00:00"}', 30.0),
        ("2026-09-21T16:14:20+02:00\n", 60.0),
        ("2026-09-21T14:14:20", 60.0),
        ("2026-09-21T14:00:00Z", 0.0),
        ("45\n", 45.0),
        ("45.5 s", 45.5),
        ("TRUE", NOTICE_S),
        ("", NOTICE_S),
        ("2026-99-21T14:14:20Z", NOTICE_S),
    ],
)
def test_seconds_left(output: str, seconds: float) -> None:
    assert seconds_left(output, NOW) == seconds


class MetadataService(BaseHTTPRequestHandler):
    """As on AWS where session tokens are required, which is the default (IMDSv2)."""

    token = "AQAEAJrZ0-x_8=="
    notice = ""

    def do_PUT(self) -> None:
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != "/latest/api/token":
            self._answer(404, "")
        elif not (seconds.isdigit() and 1 <= int(seconds) <= 21600):
            self._answer(400, "")
        else:
            self._answer(200, self.token)

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != self.token:
            self._answer(401, "401 - Unauthorized")
        elif self.path != "/latest/meta-data/spot/instance-action" or not self.notice:
            self._answer(404, "404 - Not Found")
        else:
            self._answer(200, self.notice)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests clean."""


@pytest.fixture
def metadata_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its host and port."""
    monkeypatch.setattr(MetadataService, "notice", "")
    with ThreadingHTTPServer(("127.0.0.1", 0), MetadataService) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_documented_command_for_aws_asks_with_a_token(
    metadata_service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = re.findall(
        "^hvd-elastic run .*spot/instance-action.*$", COMMANDS.read_text(), re.MULTILINE
    )
    words = shlex.split(line)
    command = words[words.index("--preemption-command") + 1]
    assert "169.254.169.254" in command

    def ask() -> subprocess.CompletedProcess[str]:
        asked = ["sh", "-c", command.replace("169.254.169.254", metadata_service)]
        return subprocess.run(asked, capture_output=True, text=True, timeout=60)

    assert ask().returncode != 0, "there is no notice yet"
    notice = '{"action": "terminate", "time": "2026-09-21T14:15:20Z"}'
    monkeypatch.setattr(MetadataService, "notice", notice)
    told = ask()
    assert told.returncode == 0, told.stderr
    assert seconds_left(told.stdout, NOW) == 120.0
