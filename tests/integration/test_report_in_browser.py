"""The page of a run in a browser: it draws all, asks for nothing, complains of nothing, fits a phone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs plotly")
aiohttp = pytest.importorskip("aiohttp", reason="needs aiohttp")

from unit.test_report import page_of, sample_records, spoiled_records  # noqa: E402

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
)  # fmt: skip
_START_S = 30.0
_LIMIT_S = 20.0
_LOOK = """
(async () => {
  await new Promise((done) => setTimeout(done, 300));
  const charts = [...document.querySelectorAll(".chart")].map((chart) => {
    const box = chart.getBoundingClientRect();
    const svg = chart.querySelector(".main-svg").getBoundingClientRect();
    const drawn = [...chart.querySelectorAll(".trace path")].filter((path) => path.getBBox().width > 0);
    const texts = [...chart.querySelectorAll("text")].filter((text) => text.textContent)
      .map((text) => [text.textContent, text.getBoundingClientRect()]);
    const outside = texts.filter(([, at]) => at.left < box.left - 1 || at.right > box.right + 1
      || at.top < box.top - 1 || at.bottom > box.bottom + 1).map(([text]) => text);
    const overlapping = texts.flatMap(([text, a], index) => texts.slice(index + 1)
      .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
      .map(([other]) => `${text} | ${other}`));
    return {
      width: svg.width, height: svg.height, is_wider: svg.width > box.width + 1, outside, overlapping,
      drawn: drawn.length, nodes: chart.querySelectorAll("*").length,
    };
  });
  return {charts, wider: document.documentElement.scrollWidth - innerWidth};
})()
"""
"""What every chart has drawn, which of its texts are outside of it or lie on each other; and whether the page
has to be scrolled sideways."""


class Browser:
    """One tab of a headless Chromium, told what to do by its own protocol, which needs no driver."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            said = await self._next()
            if said.get("id") == self._number:
                assert "error" not in said, (method, said)
                result: dict[str, Any] = said["result"]
                return result

    async def wait_for(self, event: str) -> None:
        while not any(each["method"] == event for each in self.events):
            await self._next()

    async def evaluate(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, path: Path, width: int, scheme: str = "light") -> None:
        """Show a page of a file, and wait until it is drawn."""
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        await self.call("Page.navigate", url=path.as_uri())
        await self.wait_for("Page.loadEventFired")

    async def screenshot(self, path: Path) -> None:
        """Take a picture of the whole page."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        taken = await self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**size, "x": 0, "y": 0, "scale": 1}
        )
        path.write_bytes(base64.b64decode(taken["data"]))

    async def pdf(self, path: Path) -> None:
        printed = await self.call(
            "Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69
        )
        path.write_bytes(base64.b64decode(printed["data"]))

    def of(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    async def _next(self) -> dict[str, Any]:
        said: dict[str, Any] = await self._socket.receive_json(timeout=_LIMIT_S)
        if "method" in said:
            self.events.append(said)
        return said


@contextlib.asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Browser]:
    """Start a Chromium that keeps everything in a folder, and end it."""
    folder.mkdir()
    command = [_CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    # It looks up its own updates and the like; the page's requests are seen below.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = await _port(folder / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                [tab] = [each for each in await answer.json() if each["type"] == "page"]
            # Pictures are large.
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Browser(socket)
    finally:
        process.kill()
        process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = asyncio.get_running_loop().time() + _START_S
    while asyncio.get_running_loop().time() < deadline and process.poll() is None:
        if file.exists() and (words := file.read_text().split()):
            return int(words[0])
        await asyncio.sleep(0.05)
    pytest.skip("Chromium does not start here")


@pytest.mark.slow
@pytest.mark.skipif(not _CHROMIUM, reason="needs Chromium")
def test_page_in_a_browser(tmp_path: Path) -> None:
    page_of(sample_records(), tmp_path)
    asyncio.run(_look(tmp_path / "page.html", tmp_path / "browser"))


async def _look(page: Path, folder: Path) -> None:
    async with browsing(folder) as browser:
        for width in (1280, 390):
            await browser.open(page, width)
            found = await browser.evaluate(_LOOK)
            assert [event["request"]["url"] for event in browser.of("Network.requestWillBeSent")] == [
                page.as_uri()
            ]
            for event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                assert browser.of(event) == []
            assert found["wider"] <= 0
            assert len(found["charts"]) == 10
            for chart in found["charts"]:
                assert chart["width"] > 250
                assert chart["height"] > 200
                assert chart["drawn"] > 0
                assert (chart["is_wider"], chart["outside"], chart["overlapping"]) == (False, [], [])
                # Thousands of spans are no thousands of elements.
                assert chart["nodes"] < 800
        assert await _tip_over_lanes(browser)


@pytest.mark.slow
@pytest.mark.skipif(not _CHROMIUM, reason="needs Chromium")
def test_no_text_of_a_record_becomes_html_in_a_chart(tmp_path: Path) -> None:
    page_of(spoiled_records(), tmp_path)

    async def look() -> None:
        async with browsing(tmp_path / "browser") as browser:
            await browser.open(tmp_path / "page.html", 1280)
            await browser.evaluate(_LOOK)
            assert await browser.evaluate("document.querySelectorAll('img, .chart script').length") == 0
            drawn = "[...document.querySelectorAll('.chart text')].map((text) => text.textContent).join('')"
            assert "<script>alert(1)</script><img" in await browser.evaluate(drawn)
            assert browser.of("Page.javascriptDialogOpening") == []

    asyncio.run(look())


async def _tip_over_lanes(browser: Browser) -> bool:
    """Move over the timeline until something is told about a part."""
    await browser.evaluate('document.getElementById("timeline").scrollIntoView()')
    left, top, width, height = await browser.evaluate(
        "(({x, y, width, height}) => [x, y, width, height])"
        '(document.querySelector("#timeline .nsewdrag").getBoundingClientRect())'
    )
    for y in range(int(top), min(900, int(top + height)), 8):
        await browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width / 2, y=y)
        told = await browser.evaluate('document.getElementById("tip").innerText')
        if "part.written (rank 0, lane 0)" in told and "GiB/s" in told:
            return True
    return False
