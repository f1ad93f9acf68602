"""The page of a run in a browser: it draws everything, asks for nothing, complains of nothing, and fits a phone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs plotly")
aiohttp = pytest.importorskip("aiohttp", reason="needs aiohttp")

from unit.test_report import page_of, sample_records  # noqa: E402

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
)  # fmt: skip
_START_S = 30.0
_LIMIT_S = 20.0
# Boxes of all charts, how far the page is wider than the window, what is written outside of its chart, and which
# labels of a chart lie on each other.
_LOOK = """
(async () => {
  await new Promise((done) => setTimeout(done, 300));
  const charts = [...document.querySelectorAll(".chart")].map((chart) => {
    const box = chart.getBoundingClientRect(), svg = chart.querySelector(".main-svg").getBoundingClientRect();
    const drawn = [...chart.querySelectorAll(".plot path")].filter((path) => path.getBBox().width > 0).length;
    const texts = [...chart.querySelectorAll("text")].filter((text) => text.textContent)
      .map((text) => [text.textContent, text.getBoundingClientRect()]);
    const out = texts.filter(([, at]) => at.left < box.left - 2 || at.right > box.right + 2
      || at.top < box.top - 2 || at.bottom > box.bottom + 2).map(([text]) => text);
    const over = texts.flatMap(([text, a], index) => texts.slice(index + 1)
      .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
      .map(([other]) => `${text} | ${other}`));
    return {width: svg.width, height: svg.height, drawn, out, over, fits: svg.width <= box.width + 1};
  });
  return {
    charts, wider: document.documentElement.scrollWidth - innerWidth, nodes: document.querySelectorAll("*").length,
  };
})()
"""


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
    asyncio.run(_look(tmp_path))


async def _look(folder: Path) -> None:
    page = folder / "page.html"
    async with browsing(folder / "browser") as browser:
        for width in (1280, 390):
            await browser.open(page, width)
            found = await browser.evaluate(_LOOK)
            assert [event["request"]["url"] for event in browser.of("Network.requestWillBeSent")] == [
                page.as_uri()
            ]
            for event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                assert browser.of(event) == []
            assert len(found["charts"]) == 9
            for chart in found["charts"]:
                assert chart["width"] > 250
                assert chart["height"] > 200
                assert chart["drawn"] > 0
                assert (chart["fits"], chart["out"], chart["over"]) == (True, [], [])
            assert found["wider"] <= 0
            # Thousands of spans are no thousands of elements.
            assert found["nodes"] < 4000
