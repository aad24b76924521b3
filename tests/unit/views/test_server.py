"""The live pages over real HTTP, on run folders that change while they are shown."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hvd_elastic.errors import RunError
from hvd_elastic.records.json_lines import EventLog
from hvd_elastic.records.run_folder import RunFolder
from hvd_elastic.records.run_row import run_row
from hvd_elastic.views import live, live_run
from hvd_elastic.views import server as server_module
from hvd_elastic.views.prometheus import FIGURES, GPU_FIGURES, HOST_FIGURES, prometheus_text
from hvd_elastic.views.server import Dashboard
from tests import other_user
from tests.paths import LIMIT_S, ROOT
from tests.unit.records.made_events import summarized, whole, write
from tests.unit.records.sample_run import sample_folder


class Viewer:
    """Sends requests to a dashboard."""

    def __init__(self, server: Dashboard) -> None:
        self.server = server
        self.port = server.server_address[1]

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            connection.close()

    def stream(self, path: str) -> Iterator[tuple[str, Any]]:
        """Events as they come: kind and content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        kind = "message"
        try:
            while line := answer.readline().decode():
                if line.startswith("event: "):
                    kind = line[7:].strip()
                elif line.startswith("data: "):
                    yield kind, json.loads(line[6:])
                    kind = "message"
        finally:
            connection.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HVD_ELASTIC_HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    return sample_folder(tmp_path / "runs").path


@pytest.fixture
def viewer(folder: Path) -> Iterator[Viewer]:
    server = Dashboard("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield Viewer(server)
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_first_page_lists_the_runs(viewer: Viewer) -> None:
    status, page, headers = viewer.get("/")
    assert status == 200
    assert '<a href="/runs/digits-3">digits-3</a>' in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    kind, found = next(viewer.stream("/events"))
    assert kind == "message"
    assert "digits-3" in found["html"]["runs"]


def test_a_page_has_the_parts_of_the_report_and_no_foreign_address(viewer: Viewer) -> None:
    status, page, _ = viewer.get("/runs/digits-3")
    assert status == 200
    for part in ("header", "tiles", "plots", "rescales", "audit", "decisions"):
        assert f'data-part="{part}"' in page
    assert "host node3 joined: 2 → 3 slots" in page
    assert "http://" not in page
    assert "https://" not in page
    for name in ("report.js", "live.js", "report.css", "uPlot.min.css", "uPlot.iife.min.js"):
        assert f"/assets/{name}" in page
        assert viewer.get(f"/assets/{name}")[0] == 200


def test_news_reach_a_page_that_is_open(viewer: Viewer, folder: Path) -> None:
    news = viewer.stream("/runs/digits-3/events")
    _, before = next(news)
    assert "host node9 joined" not in before["html"]["rescales"]
    with EventLog(folder / "events.jsonl") as log:
        fields = {"generation": 99, "from_size": 2, "to_size": 4, "hosts": ["node1", "node9"]}
        reason = "host node9 joined: 2 → 4 slots"
        log.append("rescale_started", {**fields, "slots": [1, 3], "reason": reason})
    _, after = next(news)
    assert "host node9 joined" in after["html"]["rescales"]
    assert "node9: 3 workers" in after["html"]["hosts"]
    assert [chart["name"] for chart in after["data"]["charts"]] == [
        chart["name"] for chart in before["data"]["charts"]
    ]


def test_a_part_of_a_chart_has_all_its_points(viewer: Viewer, folder: Path) -> None:
    begin = json.loads((folder / "events.jsonl").read_text().splitlines()[0])["t"]
    with (folder / "events.jsonl").open("a") as file:
        for number in range(9000):
            event = {"t": begin + 1000 + number, "kind": "metrics", "step": number, "loss": number}
            file.write(json.dumps(whole(event)) + "\n")
    _, found = next(viewer.stream("/runs/digits-3/events"))
    chart = next(each for each in found["data"]["charts"] if each["name"] == "loss")
    assert len(chart["x"]) <= 2000
    status, text, _ = viewer.get("/runs/digits-3/charts/loss?from=2000&to=2100.5")
    assert status == 200
    # and one beyond each end
    assert json.loads(text)["lines"] == [list(range(999, 1102))]
    assert viewer.get("/runs/digits-3/charts/position?from=0&to=1")[0] == 404
    assert viewer.get("/runs/digits-3/charts/loss?from=a&to=1")[0] == 400


def test_the_name_of_a_chart_may_have_slashes(viewer: Viewer, folder: Path) -> None:
    sample_folder(folder.parent, "digits-4")
    with EventLog(folder / "events.jsonl") as log:
        write(log, "metrics", {"step": 300, "size": 2, "val/top/5": 0.5})
    status, text, _ = viewer.get("/runs/digits-3/charts/val%2Ftop%2F5?from=0&to=1e12")
    assert status == 200, text
    assert 0.5 in json.loads(text)["lines"][0]
    both = "run=digits-3&run=digits-4"
    status, text, _ = viewer.get(f"/compare/charts/val%2Ftop%2F5?{both}&from=0&to=9")
    assert status == 200, text
    assert len(json.loads(text)["lines"]) == 2
    assert viewer.get("/runs/digits-3/charts/val%2Ftop?from=0&to=9")[0] == 404


def test_words_that_are_not_utf8_are_shown(viewer: Viewer, folder: Path) -> None:
    with EventLog(folder / "events.jsonl") as log:
        write(log, "warning", {"message": "no folder /data/caf\udce9"})
    status, page, _ = viewer.get("/runs/digits-3")
    assert status == 200
    assert r"/data/caf\udce9" in page


def test_a_run_that_is_removed_is_told(viewer: Viewer, folder: Path) -> None:
    news = viewer.stream("/runs/digits-3/events")
    next(news)
    folder.rename(folder.parents[1] / "away")  # at once: it may be looked at while it is removed
    assert next(news) == ("gone", "run digits-3 is gone: its folder was removed")
    assert viewer.get("/runs/digits-3")[0] == 404


def test_lines_that_are_no_events_and_a_clock_set_back_are_shown_around(
    viewer: Viewer, folder: Path
) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"t": 5, "kind": "warning", "message": "the clock was set back"}\n')
        file.write('{"t": 1790099999, "kind": "of_a_newer_version", "what": {}}\nno json\n{"t": 1')
    status, page, _ = viewer.get("/runs/digits-3")
    assert status == 200
    assert "the clock was set back" in page


@pytest.mark.parametrize(
    "path",
    [
        "/runs/../../etc/passwd",
        "/runs/%2e%2e",
        "/runs/..%2f..%2fetc",
        "/runs/no-such-run",
        "/runs/digits-3/run.json",
        "/assets/../server.py",
        "/assets/report.html",
    ],
)
def test_other_paths_are_not_found(viewer: Viewer, path: str) -> None:
    status, text, _ = viewer.get(path)
    assert status == 404
    assert "Traceback" not in text


def test_requests_of_other_sites_are_refused(viewer: Viewer) -> None:
    own = f"127.0.0.1:{viewer.port}"
    assert viewer.get("/", Host="evil.example:80")[0] == 421
    assert viewer.get("/", Host=f"evil.example:{viewer.port}")[0] == 421
    assert viewer.get("/runs/digits-3/events", Origin="http://evil.example")[0] == 403
    assert viewer.get("/metrics", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 403
    assert viewer.get("/", Origin=f"http://{own}", Sec_Fetch_Site="same-origin")[0] == 200
    # a link of another page that the user follows
    assert viewer.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


@pytest.mark.parametrize(("method", "status"), [("POST", 405), ("PUT", 501), ("DELETE", 501)])
def test_nothing_can_be_changed(viewer: Viewer, method: str, status: int) -> None:
    assert viewer.get("/runs/digits-3/control", method)[0] == status


@pytest.fixture
def controller(folder: Path) -> Iterator[Viewer]:
    server = Dashboard("127.0.0.1", 0, control=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield Viewer(server)
    server.shutdown()
    server.server_close()


def ask(viewer: Viewer, body: Any, *, token: bool = True, origin: bool = True) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=LIMIT_S)
    headers = {"Cookie": f"{viewer.server.cookie}={viewer.server.token}"} if token else {}
    if origin:
        headers["Origin"] = f"http://127.0.0.1:{viewer.port}"
    try:
        connection.request("POST", "/runs/digits-3/control", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_leader_is_asked_by_who_has_the_token(controller: Viewer, folder: Path) -> None:
    assert controller.get("/runs/digits-3")[0] == 403
    token = {"Authorization": f"Bearer {controller.server.token}"}
    assert 'data-control="/runs/digits-3/control"' in controller.get("/runs/digits-3", **token)[1]
    run = RunFolder.open("digits-3")
    asked: list[Any] = []
    over = threading.Event()

    def lead() -> None:
        with EventLog(folder / "events.jsonl") as log:
            while len(asked) < 3:
                for request in run.take_requests():
                    asked.append((request.op, request.fields))
                    ok = request.op != "drain"
                    told = {"id": request.id, "op": request.op, "ok": ok, "message": "so be it"}
                    log.append("command_done", told)
                over.wait(0.02)

    with run.take_lead():
        leader = threading.Thread(target=lead, daemon=True)
        leader.start()
        assert ask(controller, {"op": "scale", "np": 3}) == (200, "so be it")
        status, text = ask(controller, {"op": "drain", "host": "node1"})
        assert status == 409
        assert "refused 'drain': so be it" in text
        assert ask(controller, {"op": "stop"})[0] == 200
        leader.join(LIMIT_S)
    assert [op for op, _ in asked] == ["scale", "drain", "stop"]
    assert asked[0][1] == {"np": 3}


def test_the_leader_is_not_asked_by_others(controller: Viewer) -> None:
    with RunFolder.open("digits-3").take_lead():
        assert ask(controller, {"op": "stop"}, token=False)[0] == 403
        assert ask(controller, {"op": "stop"}, origin=False)[0] == 403
        bodies: list[Any] = [{"op": "scale", "np": 0}, {"op": "scale", "np": True}, {"op": "run"}]
        for body in [*bodies, [], 5]:
            status, text = ask(controller, body)
            assert status == 400
            assert '{"op": "stop"}' in text
        assert RunFolder.open("digits-3").take_requests() == []
    status, text = ask(controller, {"op": "stop"})
    assert status == 409
    assert "no live leader" in text


def test_others_than_this_machine_need_the_token(folder: Path) -> None:
    server = Dashboard("0.0.0.0", 0)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    viewer = Viewer(server)
    try:
        assert viewer.get("/")[0] == 403
        assert viewer.get("/?token=wrong")[0] == 403
        status, _, headers = viewer.get(f"/?token={server.token}")
        assert status == 200
        assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
        assert viewer.get("/", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200
        assert viewer.get("/metrics", Authorization=f"Bearer {server.token}")[0] == 200
        assert server.url.endswith(f"/?token={server.token}")
        assert server.url_of(["a"]).endswith(f"/runs/a?token={server.token}")
        compared = urlsplit(server.url_of(["digits-3", "digits-4"]))
        sample_folder(folder.parent, "digits-4")
        assert viewer.get(f"{compared.path}?{compared.query}")[0] == 200
    finally:
        server.shutdown()
        server.server_close()


ASK = """
for path in sys.argv[3:]:
    asked = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=60)
    asked.request("GET", path)
    answer = asked.getresponse()
    print(answer.status, answer.read().decode(), answer.getheaders())
"""


@other_user.needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_other_users_of_this_machine_see_nothing(folder: Path, host: str) -> None:
    """The run folders are for their user alone, and so are their pages."""
    try:
        server = Dashboard(host, 0)
    except RunError as error:
        pytest.skip(str(error))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    paths = ["/", "/runs/digits-3", "/metrics", "/assets/live.js", "/runs/digits-3/events"]
    said = other_user.start(ASK, host, str(server.server_address[1]), *paths).communicate(
        timeout=LIMIT_S
    )[0]
    own = http.client.HTTPConnection(host, server.server_address[1], timeout=LIMIT_S)
    own.request("GET", "/runs/digits-3")
    status = own.getresponse().status
    own.close()
    server.shutdown()
    server.server_close()
    thread.join()
    assert said.count("403 this dashboard shows runs to user root (uid 0) alone") == len(paths)
    assert "digits" not in said
    assert status == 200


def answer(viewer: Viewer, method: str, path: str, body: str = "", **headers: str) -> str:
    """Everything that is sent in answer to requests that follow each other, the first with these
    headers and the last without a token."""
    own = {"Host": f"127.0.0.1:{viewer.port}", "Content-Length": str(len(body)), **headers}
    first = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in own.items())
    last = f"GET / HTTP/1.1\r\nHost: {own['Host']}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", viewer.port), 20) as sock:
        sock.sendall(f"{method} {path} HTTP/1.1\r\n{first}\r\n{body}{last}".encode())
        return b"".join(iter(lambda: sock.recv(65536), b"")).decode()


@pytest.mark.parametrize(
    ("status", "method", "path", "headers"),
    [
        (400, "GET", "/", {"Origin": "http://[bad"}),
        (403, "GET", "/", {}),
        (403, "HEAD", "/", {}),
        (403, "GET", "/runs/digits-3/events", {}),
        (403, "GET", "/?token=wrong", {}),
        (403, "GET", "/", {"Cookie": "hvd_elastic_token_{port}=wrong"}),
        (403, "GET", "/metrics", {"Authorization": "Bearer "}),
        (403, "GET", "/?token={token}", {"Origin": "http://evil.example"}),
        (403, "GET", "/no-such-page", {}),
        (403, "POST", "/runs/digits-3/control", {}),
        (421, "GET", "/", {"Host": "evil.example"}),
        (501, "PUT", "/", {}),
        (400, "GET", "/ and more", {}),
    ],
)
def test_the_token_is_in_no_answer_to_who_does_not_show_it(
    controller: Viewer, status: int, method: str, path: str, headers: dict[str, str]
) -> None:
    server = controller.server
    known = {"port": str(controller.port), "token": server.token}
    shown = {name: value.format(**known) for name, value in headers.items()}
    told = answer(controller, method, path.format(**known), **shown)
    assert int(told.split(maxsplit=2)[1]) == status
    assert server.token not in told


def test_the_cookie_is_set_only_by_the_request_that_shows_the_token(controller: Viewer) -> None:
    token = controller.server.token
    own = f"http://127.0.0.1:{controller.port}"
    for status, method, path in [
        (200, "GET", "/runs/digits-3"),
        (404, "GET", "/no-such-page"),
        (400, "GET", "/runs/digits-3/charts/loss?from=nan&to=5"),
        (409, "POST", "/runs/digits-3/control"),
    ]:
        shown = {"Authorization": f"Bearer {token}", "Origin": own}
        told = answer(controller, method, path, '{"op": "stop"}' * (method == "POST"), **shown)
        answers = told.split("HTTP/1.1 ")[1:]
        assert [int(each[:3]) for each in answers] == [status, 403][: len(answers)]
        assert [token in each for each in answers] == [True, False][: len(answers)]
        assert len(answers) == 1 + (method == "GET"), "a POST ends the connection"


def test_a_port_in_use_is_told(viewer: Viewer) -> None:
    with pytest.raises(RunError, match=f"port {viewer.port}: Address already in use. Give another"):
        Dashboard("127.0.0.1", viewer.port)


def test_viewers_that_go_away_without_a_word_leave_nothing(viewer: Viewer, folder: Path) -> None:
    before = threading.active_count()
    viewers = [socket.create_connection(("127.0.0.1", viewer.port)) for _ in range(10)]
    for each in viewers:
        host = f"Host: 127.0.0.1:{viewer.port}"
        each.sendall(f"GET /runs/digits-3/events HTTP/1.1\r\n{host}\r\n\r\n".encode())
        assert each.recv(100).startswith(b"HTTP/1.1 200")
    for each in viewers:
        each.close()
    gone = threading.Event()
    for number in range(1000):
        if threading.active_count() <= before:
            break
        with EventLog(folder / "events.jsonl") as log:
            log.append("warning", {"message": str(number)})
        gone.wait(0.2)
    assert threading.active_count() <= before


def test_figures_for_prometheus(viewer: Viewer, folder: Path) -> None:
    lock = RunFolder.open("digits-3").take_lead()
    try:
        status, text, headers = viewer.get("/metrics")
    finally:
        lock.close()
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'hvd_elastic_run_info{run="digits-3",state="succeeded"} 1' in text
    assert "# TYPE hvd_elastic_steps_total counter" in text
    assert 'hvd_elastic_rescales_total{run="digits-3"} 4' in text
    assert viewer.get("/metrics")[1] == text, "it has just ended, and can be read for a while"
    os.utime(folder / "events.jsonl", (0, 0))
    assert 'run="digits-3"' not in viewer.get("/metrics")[1]
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_prometheus_has_the_gpus_of_each_host() -> None:
    run = summarized(
        [
            {"t": 1.0, "kind": "run_started", "run_id": "a"},
            {"t": 2.0, "kind": "rescale_finished", "generation": 1, "size": 2},
            {
                "t": 3.0,
                "kind": "host_sample",
                "host": "node1",
                "cpu": 0.5,
                "gpus": [
                    {"busy": 0.75, "memory": 0.25, "memory_bytes": 1},
                    {"busy": 1.0, "memory": 0.5, "memory_bytes": 1},
                ],
            },
        ]
    )
    text = prometheus_text([(run, "running")])
    assert 'hvd_elastic_host_cpu_ratio{run="a",host="node1"} 0.5' in text
    assert 'hvd_elastic_host_gpu_ratio{run="a",host="node1",gpu="0"} 0.75' in text
    assert 'hvd_elastic_host_gpu_memory_ratio{run="a",host="node1",gpu="1"} 0.5' in text
    assert prometheus_text([]) == ""


def test_the_dashboard_for_grafana_asks_for_figures_that_there_are() -> None:
    text = (ROOT / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"hvd_elastic_(\w+)", text)) - {"run_info"}
    assert len(json.loads(text)["panels"]) == 16
    of_hosts = HOST_FIGURES.keys() | GPU_FIGURES.keys()
    assert asked <= FIGURES.keys() | of_hosts
    assert of_hosts <= asked
    assert {"slots", "throughput_examples_per_second"} <= asked


def test_runs_are_compared_on_one_page(viewer: Viewer, folder: Path) -> None:
    other = sample_folder(folder.parent, "digits-4").path
    status, page, _ = viewer.get("/compare?run=digits-3&run=digits-4")
    assert status == 200
    assert "<h1>digits-3 and digits-4</h1>" in page
    news = viewer.stream("/compare/events?run=digits-3&run=digits-4")
    _, before = next(news)
    with EventLog(other / "events.jsonl") as log:
        write(log, "run_finished", {"status": "failed", "message": "", "steps": 1})
    _, after = next(news)
    assert before["html"]["runs"] != after["html"]["runs"]
    assert "failed" in after["html"]["runs"]
    status, text, _ = viewer.get("/compare/charts/loss?run=digits-3&run=digits-4&from=5&to=6")
    found = json.loads(text)
    assert (found["x"][0], found["x"][-1], len(found["lines"])) == (5.0, 6.0, 2)
    assert found["lines"][0] == found["lines"][1]
    assert viewer.get("/compare?run=digits-3")[:2] == (404, "choose 2 to 6 runs to compare, not 1")
    assert viewer.get("/compare?run=digits-3&run=../x")[0] == 404
    assert viewer.get("/compare?run=digits-3&run=no-such-run")[0] == 404


def test_a_file_too_long_to_be_read_at_once_is_shown_as_it_is_read(
    viewer: Viewer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_run, "_READ_S", 1e-4)  # a piece each time
    monkeypatch.setattr(live_run, "_PIECE_BYTES", 1 << 19)
    begin = json.loads((folder / "events.jsonl").read_text().splitlines()[0])["t"]
    number = 60_000
    with (folder / "events.jsonl").open("a") as file:
        for step in range(number):
            spike = 9.0 if step == 31_234 else 1.0
            event = {"t": begin + 100 + step, "kind": "metrics", "step": step + 1, "loss": step,
                     "throughput": 7.0, "lr": 0.1, "spike": spike}  # fmt: skip
            file.write(json.dumps(whole(event)) + "\n")
        file.write('{"t": 5, "kind": "met')  # the leader's disk was full
    status, page, _ = viewer.get("/runs/digits-3")
    assert status == 200
    assert "reading its events" in page
    states: list[str] = []
    data: dict[str, Any] = {}
    for _, found in viewer.stream("/runs/digits-3/events"):
        states.append(found["live"])
        data = found.get("data", data)
        if not found["live"].startswith("reading"):
            break
    assert len(states) > 1
    charts = {chart["name"]: chart for chart in data["charts"]}
    assert charts["loss"]["y"][-1] == number - 1
    assert max(charts["spike"]["y"]) == 9.0, "a peak is not thinned out"
    summary = viewer.server.runs.get("digits-3").read()
    assert len(summary.series["loss"].values) < 45_000
    status, text, _ = viewer.get("/runs/digits-3/charts/loss?from=30099.5&to=30200.5")
    assert json.loads(text)["lines"] == [list(range(29_999, 30_102))], "read again in full detail"


@pytest.mark.parametrize(
    "path",
    [
        "/runs/digits-3/charts/loss?from=nan&to=5",
        "/runs/digits-3/charts/loss?from=0&to=inf",
        "/compare/charts/loss?run=digits-3&run=digits-4&from=-inf&to=inf",
    ],
)
def test_times_that_are_no_numbers_are_refused(viewer: Viewer, folder: Path, path: str) -> None:
    sample_folder(folder.parent, "digits-4")
    status, text, _ = viewer.get(path)
    assert status == 400
    assert "takes a time in seconds" in text


def test_an_origin_that_is_no_address_gets_an_answer(viewer: Viewer) -> None:
    assert viewer.get("/", Origin="http://[bad")[0] == 400


def test_two_dashboards_with_tokens_can_be_open_in_one_browser(folder: Path) -> None:
    cookies = set()
    for _ in range(2):
        server = Dashboard("127.0.0.1", 0, control=True)
        try:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            headers = Viewer(server).get(f"/?token={server.token}")[2]
            cookies.add(headers["Set-Cookie"].partition("=")[0])
            status, _, _ = Viewer(server).get("/", Cookie=headers["Set-Cookie"].partition(";")[0])
            assert status == 200
        finally:
            server.shutdown()
            server.server_close()
    assert len(cookies) == 2


def test_it_listens_on_an_address_of_ipv6(folder: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = Dashboard("::1", 0)
    except RunError as error:
        pytest.skip(str(error))
    try:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        port = server.server_address[1]
        assert server.url == f"http://[::1]:{port}/"
        connection = http.client.HTTPConnection("::1", port, timeout=LIMIT_S)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.shutdown()
        server.server_close()


def test_a_viewer_who_never_finishes_asking_is_given_up(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", viewer.port), timeout=LIMIT_S) as asking:
        asking.sendall(b"GET / HTTP/1.1\r\n")
        assert asking.recv(1) == b""


def test_the_first_page_has_the_newest_runs_and_all_that_go_on(
    viewer: Viewer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_ROWS", 3)
    monkeypatch.setattr(live, "_FRESH_S", 0.0)
    for number in range(5):
        made = folder.parent / f"newer-{number}"
        shutil.copytree(folder, made)
        asked = json.loads((made / "run.json").read_text()) | {"created": 4e9 + number}
        (made / "run.json").write_text(json.dumps(asked))
    page = viewer.get("/")[1]
    assert "The newest 3 of 6 runs" in page
    assert "newer-2" in page
    assert "newer-1" not in page
    assert "digits-3" not in page
    with RunFolder(folder).take_lead():
        assert "/runs/digits-3" in viewer.get("/")[1]


def test_a_run_that_is_over_is_not_read_again_for_the_first_page(
    viewer: Viewer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_FRESH_S", 0.0)
    looked: list[str] = []

    def look(each: RunFolder) -> dict[str, Any]:
        looked.append(each.run_id)
        return run_row(each)

    monkeypatch.setattr(live, "run_row", look)
    with EventLog(folder / "events.jsonl") as log:
        write(log, "run_finished", {"status": "succeeded", "message": "", "steps": 1})
    assert "succeeded" in viewer.get("/")[1]
    assert "succeeded" in viewer.get("/")[1]
    assert looked == ["digits-3"]
    with EventLog(folder / "events.jsonl") as log:
        write(log, "run_finished", {"status": "failed", "message": "", "steps": 1})
    assert "failed" in viewer.get("/")[1]
    assert looked == ["digits-3", "digits-3"]
