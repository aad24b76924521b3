"""A live page of a real run in a real browser: a join and a kill appear there."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed.run_processes import workers_of
from tests.dist.jobs import (
    Job,
    assert_nothing_left,
    command,
    ended,
    environment,
    hostfile_of,
    write_script,
)
from tests.paths import LIMIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to show pages in"),
]


def test_a_join_and_a_kill_appear_on_the_page_of_a_real_run(tmp_path: Path) -> None:
    hostfile = hostfile_of(tmp_path / "hosts", ["localhost"], slots=1)
    script = write_script(tmp_path)
    arguments = ["--epochs", 4000, "--examples", 100, "--step-time", 0.02]
    job = Job("-H", hostfile, "--", sys.executable, script, *arguments, home=tmp_path)
    with job:
        job.until_trains(1)
        serve = subprocess.Popen(
            command("dashboard", job.run_id),
            stdout=subprocess.PIPE,
            text=True,
            env=environment(tmp_path),
            start_new_session=True,
        )
        assert serve.stdout is not None
        with ended(serve), serve.stdout, playwright.sync_playwright() as started:
            url = serve.stdout.readline().split()[1]
            browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(1000 * LIMIT_S)
            complaints: list[str] = []
            page.on("console", lambda said: complaints.append(said.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(url)
            page.wait_for_selector("html[data-plots]")
            assert "Trains on 1 slot" in page.locator(".words").inner_text()

            hostfile_of(hostfile, ["localhost"], slots=2)
            page.wait_for_selector(".marks .up")
            page.click(".marks .up")
            assert "1 → 2" in page.locator(".reason").inner_text()

            next(worker for worker in workers_of(job.run_id) if worker.slot == 1).kill()
            page.wait_for_selector(".marks .down")
            page.click(".marks .down")
            assert "signal 9" in page.locator(".reason").inner_text()

            job.until(lambda: job.events("host_sample"), "the host is sampled")
            page.wait_for_selector("td:has-text('localhost') ~ td:has-text('%')")
            assert page.locator(".done").get_attribute("aria-label").endswith("% done")
            assert "% done" in page.locator(".words").inner_text()
            assert complaints == []
            browser.close()
        job.process.send_signal(signal.SIGINT)
        job.wait()
    assert_nothing_left(run_id=job.run_id)
