"""Measures the live pages: opening long runs, the cost of looking on, and training beside it.

Run it: ``python benchmarks/dashboard.py --out benchmarks/results/dashboard.json``; it needs
Debian's chromium. TensorBoard reads the same metrics beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.testbed.command import Say, check_names, names, run_benchmark
from benchmarks.testbed.figures import Result, conditions, figure, spread
from benchmarks.testbed.launchers import OUR_PROGRAM, ROOT
from benchmarks.testbed.replay import Replay
from hvd_elastic.errors import RunError
from hvd_elastic.records.events import event_of
from hvd_elastic.records.json_lines import Follower, decode_record, iter_records
from hvd_elastic.records.tensorboard import TensorBoardWriter

PARTS = ("open", "large", "live", "training")
RUN = "long-run"
DEADLINE_S = 900.0
_READING = "reading its events"
_TRAIN = """
import sys, time, torch, hvd_elastic.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
data = torch.utils.data.TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
loader = hvd.DataLoader(data, 64, shuffle=True)
@hvd.run
def train(state):
    for _ in hvd.epochs(10**6):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        state.commit(loss=loss)
train(hvd.State(model=model, optimizer=optimizer))
"""


class Served:
    """A server of pages as a process of its own."""

    def __init__(self, command: list[str], home: Path, port: int) -> None:
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "HVD_ELASTIC_HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.port = port
        self.process = psutil.Process(self._process.pid)

    def get(self, path: str) -> str:
        """Return a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status != 200:
                raise RunError(f"{path}: {answer.status} {text[:200]}")
            return text

    def wait(self) -> None:
        """Wait until it listens."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.get("/")
                return
            time.sleep(0.02)
        raise RunError("the server does not listen")

    def family(self) -> list[psutil.Process]:
        """Return its processes."""
        return [self.process, *self.process.children(recursive=True)]

    def resident_mb(self) -> float:
        """Return the memory that its processes hold."""
        return sum(each.memory_info().rss for each in self.family()) / 1e6

    def close(self) -> None:
        """End it."""
        for each in self.family():
            with contextlib.suppress(psutil.Error):
                each.kill()
        self._process.wait()


@contextlib.contextmanager
def dashboard(home: Path) -> Iterator[Served]:
    """Serve the pages of the runs of a folder."""
    port = _free_port()
    served = Served([*OUR_PROGRAM, "dashboard", "--port", str(port)], home, port)
    try:
        served.wait()
        yield served
    finally:
        served.close()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise RunError("there is no chromium here: apt-get install chromium")
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_run(home: Path, hours: float, *, ends: bool = True) -> Replay:
    """Write a run with four ``metrics`` a second, samples of hosts, and a rescale now and then."""
    (home / "runs").mkdir(parents=True, exist_ok=True)
    run = Replay(home / "runs", RUN, start=time.time() - 3600 * hours - 60, hours=hours)
    run.begin("node1", "node2")
    for turn in range(20):
        run.train(3600 * hours / 20)
        if turn % 4 == 1 and "node3" not in run.hosts:
            run.join("node3")
        elif turn % 4 == 3 and "node3" in run.hosts:
            run.lose("node3")
    if ends:
        run.end()
    else:
        run.flush()
    return run


def measure_open(home: Path, repetitions: int, say: Say) -> dict[str, Any]:
    """Return how long the page of a run takes to open, in a server that has just started."""
    events = home / "runs" / RUN / "events.jsonl"
    first, whole, drawn, memory = [], [], [], []
    with browser() as chromium:
        for number in range(repetitions):
            say(f"opening, {number + 1} of {repetitions}")
            with dashboard(home) as served:
                began = time.perf_counter()
                page = served.get(f"/runs/{RUN}")
                first.append(time.perf_counter() - began)
                while _READING in page:
                    time.sleep(0.05)
                    page = served.get(f"/runs/{RUN}")
                whole.append(time.perf_counter() - served.began)
                memory.append(served.resident_mb())
            with dashboard(home) as served:
                shown = chromium.new_page()
                began = time.perf_counter()
                shown.goto(f"http://127.0.0.1:{served.port}/runs/{RUN}")
                shown.wait_for_selector("html[data-plots]", timeout=1000 * DEADLINE_S)
                shown.evaluate("() => new Promise((done) => requestAnimationFrame(done))")
                drawn.append(time.perf_counter() - began)
                shown.close()
    return {
        "events_mb": round(events.stat().st_size / 1e6, 1),
        "metrics_events": sum(event["kind"] == "metrics" for event in iter_records(events)),
        "first_page": figure(first),
        "all_read_from_start_of_server": figure(whole),
        "drawn_in_browser": figure(drawn),
        "server_mb": round(max(memory), 1),
    }


def measure_tensorboard(home: Path, repetitions: int, say: Say) -> dict[str, Any]:
    """Return how long TensorBoard takes until it has the last point of the same metrics."""
    say("writing for TensorBoard")
    logs = home / "tensorboard"
    last = 0
    with TensorBoardWriter(logs / RUN, say) as writer:
        for record in iter_records(home / "runs" / RUN / "events.jsonl"):
            writer.write_metrics(event_of(record))
            last = record.get("step", last) if record["kind"] == "metrics" else last
    whole, memory = [], []
    for number in range(repetitions):
        say(f"TensorBoard, {number + 1} of {repetitions}")
        port = _free_port()
        program = [str(Path(sys.executable).with_name("tensorboard")), "--logdir", str(logs)]
        served = Served([*program, "--port", str(port)], home, port)
        try:
            served.wait()
            while not _has_point(served, last):
                time.sleep(0.05)
                if time.perf_counter() - served.began > DEADLINE_S:
                    raise RunError("TensorBoard has not read the run")
            whole.append(time.perf_counter() - served.began)
            memory.append(served.resident_mb())
        finally:
            served.close()
    return {"all_read_from_start_of_server": figure(whole), "server_mb": round(max(memory), 1)}


def _has_point(served: Served, step: int) -> bool:
    with contextlib.suppress(RunError, ValueError):
        path = f"/data/plugin/scalars/scalars?run={RUN}&tag=train%2Floss"
        points = json.loads(served.get(path))
        return bool(points) and points[-1][1] >= step
    return False


def measure_live(home: Path, run: Replay, seconds: float, say: Say) -> dict[str, Any]:
    """Return what a page of a run costs that gets two events a second, on each side."""
    with dashboard(home) as served, browser() as chromium, run.folder.take_lead():
        page = chromium.new_page()
        page.goto(f"http://127.0.0.1:{served.port}/runs/{RUN}")
        page.wait_for_selector("html[data-plots]")
        page.wait_for_function(f"() => !document.body.innerText.includes('{_READING}')")
        time.sleep(3)
        shows = [
            process
            for process in psutil.Process().children(recursive=True)
            if "--type=renderer" in process.cmdline()
        ]
        before = [_cpu_s(served.family()), _cpu_s(shows)]
        began = time.monotonic()
        changes = 0
        while (elapsed := time.monotonic() - began) < seconds:
            run.train(0.5, 0.5)
            changes += 1
            say(f"looking on, {elapsed:.0f} of {seconds:.0f} s")
            page.wait_for_timeout(max(0.0, 1000 * (began + changes / 2 - time.monotonic())))
        after = [_cpu_s(served.family()), _cpu_s(shows)]
        parts = [(end - start) / elapsed for start, end in zip(before, after, strict=True)]
        heap = page.evaluate("() => performance.memory.usedJSHeapSize") / 1e6
        return {
            "seconds": round(elapsed),
            "events_per_s": round(changes / elapsed, 2),
            "server_core": round(parts[0], 4),
            "browser_core": round(parts[1], 4),
            "server_mb": round(served.resident_mb(), 1),
            "browser_heap_mb": round(heap, 1),
        }


def _cpu_s(processes: list[psutil.Process]) -> float:
    found = 0.0
    for each in processes:
        with contextlib.suppress(psutil.Error):
            used = each.cpu_times()
            found += used.user + used.system
    return found


def measure_training(folder: Path, pairs: int, seconds: float, say: Say) -> dict[str, Any]:
    """Return throughput with a viewer relative to that without, in turns within one run."""
    script, hosts = folder / "train.py", folder / "hosts"
    script.write_text(_TRAIN, encoding="utf-8")
    hosts.write_text("localhost slots=1\n", encoding="utf-8")
    home = folder / "home"
    home.mkdir()
    environment = {**os.environ, "HVD_ELASTIC_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [*OUR_PROGRAM, "run", "--run-id", RUN, "-H", str(hosts), "--checkpoint-every", "0"]
    job = subprocess.Popen(
        [*command, "--", sys.executable, str(script)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    follower = Follower(home / "runs" / RUN / "events.jsonl", decode_record)
    rates: dict[bool, list[float]] = {False: [], True: []}
    try:
        deadline = time.monotonic() + 120
        while not any(event["kind"] == "metrics" for event in follower.poll()):
            if time.monotonic() > deadline or job.poll() is not None:
                raise RunError("the run does not train")
            time.sleep(0.1)
        time.sleep(5)
        for number in range(pairs):
            # A pair begins with each in turn, so that a drift does not favour one.
            for watched in ((False, True), (True, False))[number % 2]:
                say(f"training {'with' if watched else 'without'} a viewer, pair {number + 1}")
                with _viewer(home) if watched else contextlib.nullcontext():
                    follower.poll()
                    time.sleep(seconds)
                    rates[watched].append(_throughput(follower.poll))
    finally:
        job.terminate()
        job.wait()
    ratios = [seen / alone for alone, seen in zip(rates[False], rates[True], strict=True)]
    error = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return {
        "pairs": pairs,
        "seconds_each": seconds,
        "examples_per_s_alone": round(statistics.median(rates[False])),
        "with_viewer": {name: round(value, 4) for name, value in spread(ratios).items()},
        "observations": [round(each, 3) for each in ratios],
        "mean": round(statistics.fmean(ratios), 4),
        "interval_95": round(error, 4),
    }


@contextlib.contextmanager
def _viewer(home: Path) -> Iterator[None]:
    """Look on as a browser on another machine does: open the page, and take what is new."""
    with dashboard(home) as served:
        served.get(f"/runs/{RUN}")
        over = threading.Event()

        def look() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
            with contextlib.closing(connection), contextlib.suppress(OSError, ValueError):
                connection.request("GET", f"/runs/{RUN}/events")
                answer = connection.getresponse()
                while not over.is_set() and answer.readline():
                    pass

        looks = threading.Thread(target=look, daemon=True)
        looks.start()
        time.sleep(2)  # the server's start is not what a viewer costs
        yield
        over.set()
    looks.join(20)


def _throughput(poll: Callable[[], list[dict[str, Any]]]) -> float:
    made = [event for event in poll() if event["kind"] == "metrics"]
    first, last = made[0], made[-1]
    return float((last["examples"] - first["examples"]) / (last["t"] - first["t"]))


def measure(options: argparse.Namespace, say: Say) -> Result:
    """Measure the parts that were asked for."""
    load_before = os.getloadavg()
    parts = names(options.parts)
    check_names("--parts", parts, PARTS)
    opening: list[dict[str, Any]] = []
    body: dict[str, Any] = {"opening": opening}
    with tempfile.TemporaryDirectory(prefix="hvd-elastic-bench-") as folder:
        home = Path(folder) / "eight-hours"
        if "open" in parts:
            say("writing a run of 8 hours")
            write_run(home, 8.0).close()
            opening.append({"what": "8 hours", **measure_open(home, options.repetitions, say)})
            beside = measure_tensorboard(home, options.repetitions, say)
            opening.append({"what": "8 hours in TensorBoard", **beside})
        if "live" in parts:
            say("writing a run of 8 hours")
            home = Path(folder) / "live"
            run = write_run(home, 8.0, ends=False)
            body["live"] = [measure_live(home, run, options.seconds, say)]
        if "large" in parts:
            say(f"writing a run of {options.hours:g} hours")
            large = Path(folder) / "large"
            write_run(large, options.hours).close()
            hours = f"{options.hours:g} hours"
            opening.append({"what": hours, **measure_open(large, 1, say)})
        if "training" in parts:
            body["training"] = [measure_training(Path(folder), options.pairs, 15.0, say)]
    note = "A run with four metrics events a second, eight numbers each."
    return Result("dashboard", conditions("this machine", note, load_before), body)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to look on")
    parser.add_argument("--hours", type=float, default=200.0, help="of the large run")
    parser.add_argument("--pairs", type=int, default=8, help="of training with and without")
    return run_benchmark(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
