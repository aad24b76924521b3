"""The live pages in a real browser (Debian's Chromium, driven by Playwright).

With ``HVD_ELASTIC_PICTURES=docs/pictures`` the pictures of the documentation are taken anew.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.testbed.replay import Replay
from hvd_elastic.views.server import Dashboard
from tests.paths import LIMIT_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to show pages in")

WIDE, PHONE = {"width": 1280, "height": 1000}, {"width": 390, "height": 844}
TALL = {"width": 1280, "height": 1640}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Site:
    """A dashboard with a run that goes on, and one that is over."""

    def __init__(self, home: Path) -> None:
        now = time.time()
        runs = home / "runs"
        runs.mkdir()
        self.over = Replay(runs, "resnet-7", start=now - 9000, hours=0.4, seed=3, speed=800)
        self.over.begin("node1", "node2")
        self.over.train(700, 1.0)
        self.over.join("node3")
        self.over.train(600, 1.0)
        self.over.end()
        self.run = Replay(runs, "resnet-8", start=now - 2210)
        self.run.begin("node1", "node2")
        for change in (
            lambda: self.run.join("node3"),
            lambda: self.run.grow_batch(512),
            lambda: self.run.kill("node2"),
            lambda: self.run.join("node4"),
            lambda: self.run.grow_batch(1024),
            lambda: self.run.lose("node4"),
        ):
            self.run.train(300, 0.5)
            change()
            self.run.slow["node3"] = 1.5
        self.run.train(380, 0.5)
        self.lead = self.run.folder.take_lead()
        self.server = Dashboard("127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return self.server.url

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.lead.close()
        self.run.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_ELASTIC_HOME", str(home))
        site = Site(home)
        yield site
        site.close()


@pytest.fixture
def open_page(browser: Browser, site: Site) -> Iterator[Any]:
    """Opens pages; at the end none of them may have complained or asked another server."""
    complaints: list[str] = []
    pages: list[Page] = []

    def open_page(path: str, *, scheme: Any = "light", size: Any = WIDE) -> Page:
        page = browser.new_page(viewport=size, color_scheme=scheme)
        pages.append(page)
        page.set_default_timeout(1000 * LIMIT_S)
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url.startswith((site.url, "data:", "blob:"))
                else complaints.append(asked.url)
            ),
        )
        page.goto(site.url + path)
        page.wait_for_selector("html[data-plots]")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []


def marks(page: Page) -> list[str]:
    return [str(each.inner_text()) for each in page.locator(".marks button").all()]


def assert_accessible(page: Page) -> None:
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def take_picture(page: Page, name: str, tmp_path: Path) -> None:
    wanted = os.environ.get("HVD_ELASTIC_PICTURES")
    folder = Path(wanted) if wanted else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    page.screenshot(path=folder / f"{name}.png")
    assert (folder / f"{name}.png").stat().st_size > 20_000


def test_what_happens_to_a_run_appears_and_can_be_opened(open_page: Any, site: Site) -> None:
    page = open_page("runs/resnet-8")
    assert page.locator("#live").inner_text().startswith("running")
    assert marks(page) == ["1", "◆", "2", "3", "◆", "4"]
    assert page.locator(".allocation rect").count() > 8
    happen_and_open(page, site, lambda: site.run.join("node4"), "5", "node4 joined: 5 → 7 slots")
    words = "killed by signal 9 (SIGKILL): 7 → 6 slots"
    happen_and_open(page, site, lambda: site.run.kill("node4"), "6", words)
    site.run.train(3)
    page.wait_for_function("document.querySelector('.words').innerText.includes('6 slots')")
    assert words in page.locator(".reason").inner_text(), "it stays open"
    page.locator(".marks button", has_text="6").click()
    assert page.locator(".reason").is_hidden()


def happen_and_open(
    page: Page, site: Site, change: Callable[[], None], number: str, words: str
) -> None:
    """What happens gets a mark with a number, which tells it in words."""
    change()
    site.run.flush()
    mark = page.locator(".marks button", has_text=number)
    mark.wait_for()
    mark.click()
    assert words in page.locator(".reason").inner_text()
    assert mark.get_attribute("aria-expanded") == "true"


def test_a_part_that_is_zoomed_to_has_more_detail(open_page: Any) -> None:
    page = open_page("runs/resnet-8")
    plot = page.locator(".chart[data-name=loss] .plot")
    plot.scroll_into_view_if_needed()
    inside = "([a, b]) => document.querySelector('.chart[data-name=loss] .plot').plot.data[0]"
    inside += ".filter((x) => x >= a && x <= b).length"
    box = plot.locator(".u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    with page.expect_response("**/charts/loss?*") as answered:
        page.mouse.move(box["x"] + 0.40 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.45 * box["width"], middle, steps=4)
        page.mouse.up()
    found = answered.value.json()
    ends = [found["x"][1], found["x"][-2]]
    assert 0.04 < (ends[1] - ends[0]) / 2210 < 0.06
    page.wait_for_function(f"(ends) => ({inside})(ends) === {len(found['x']) - 2}", arg=ends)
    reloaded = open_page("runs/resnet-8")
    assert reloaded.evaluate(inside, ends) < 0.9 * len(found["x"]), "there was less detail before"
    plot.locator(".u-over").dblclick()
    page.wait_for_function(f"(ends) => ({inside})(ends) < {0.9 * len(found['x'])}", arg=ends)


def test_two_runs_are_compared(open_page: Any, tmp_path: Path) -> None:
    page = open_page("")
    assert_accessible(page)
    for name in ("resnet-7", "resnet-8"):
        page.get_by_label(f"compare {name}").check()
    page.wait_for_timeout(1200)  # the table is renewed meanwhile
    page.get_by_role("button", name="Compare").click()
    page.wait_for_selector("html[data-plots]")
    assert page.locator("h1").inner_text() == "resnet-7 and resnet-8"
    lines = "document.querySelector('.chart[data-name=loss] .plot').plot.data.map((y) => y.length)"
    assert page.evaluate(lines) == [801] * 5, "time, a line and its mean for each run"
    assert_accessible(page)
    take_picture(page, "compare", tmp_path)


def test_every_figure_is_reached_by_keyboard(open_page: Any) -> None:
    page = open_page("runs/resnet-8")
    count = page.locator(".chart").count()
    assert count == 10
    reached: set[str] = set()
    opened = False
    for _ in range(200):
        page.keyboard.press("Tab")
        kind, name = page.evaluate(
            "[document.activeElement.className, "
            "document.activeElement.closest('.chart')?.dataset.name ?? '']"
        )
        if kind.startswith("mark") and not opened:
            page.keyboard.press("Enter")
            opened = page.locator(".reason").is_visible()
        if kind == "plot":
            page.keyboard.press("End")
            page.keyboard.press("ArrowLeft")
            page.locator(f".chart[data-name={name}] .readout", has_text="·").wait_for()
            reached.add(name)
        if len(reached) == count:
            break
    assert opened
    assert len(reached) == count
    page.locator(".chart[data-name=loss] summary").press("Enter")
    page.locator(".chart[data-name=loss] details td").first.wait_for()
    assert page.locator(".chart[data-name=loss] details td").count() > 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screen_readers_can_read_a_page_as_on_the_picture(
    open_page: Any, scheme: str, tmp_path: Path
) -> None:
    page = open_page("runs/resnet-8", scheme=scheme, size=TALL)
    page.locator(".marks button", has_text="2").click()
    assert_accessible(page)
    take_picture(page, f"run-{scheme}", tmp_path)


def test_a_narrow_page_is_not_wider_than_its_window(open_page: Any, tmp_path: Path) -> None:
    for path in ("runs/resnet-8", "", "compare?run=resnet-7&run=resnet-8"):
        page = open_page(path, size=PHONE)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, path
        if path == "runs/resnet-8":
            take_picture(page, "run-phone", tmp_path)
            assert_accessible(page)


def test_a_plot_is_saved_as_picture(open_page: Any, tmp_path: Path) -> None:
    page = open_page("runs/resnet-8")
    chart = page.locator(".chart[data-name=throughput]")
    saved = {}
    for kind in ("PNG", "SVG"):
        with page.expect_download() as download:
            chart.get_by_role("button", name=f"save as {kind}").click()
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
    assert [path.name for path in saved.values()] == ["throughput.png", "throughput.svg"]
    assert saved["PNG"].read_bytes().startswith(b"\x89PNG")
    root = ET.parse(saved["SVG"]).getroot()
    named = {each.tag.rpartition("}")[2] for each in root.iter()}
    assert {"svg", "title", "text", "path", "clipPath"} <= named
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert texts[0] == "Throughput [examples/s]"
    assert "10:00" in texts
    longest = max((each.get("d") or "" for each in root.iter()), key=len)
    assert longest.count("L") > 500


def test_a_page_that_is_not_seen_holds_no_connection(open_page: Any, site: Site) -> None:
    """Browsers open six connections to a server, for all tabs together."""
    page = open_page("runs/resnet-8")
    page.locator("#live", has_text="running").wait_for()
    hide = "(value) => { Object.defineProperty(document, 'hidden', { value, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    with page.expect_event("requestfailed", lambda asked: asked.url.endswith("/events")):
        page.evaluate(hide, True)
    with page.expect_request("**/runs/resnet-8/events"):
        page.evaluate(hide, False)
    before = len(marks(page))
    site.run.join("node5")
    site.run.flush()
    page.locator(".marks button").nth(before).wait_for()
