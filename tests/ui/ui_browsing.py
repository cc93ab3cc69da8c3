"""Pages of the monitor in a real browser, and everything that they complain of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.airflow_client import AirflowClient

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Frame, FrameLocator, Locator, Page

_PICTURES = Path(__file__).resolve().parents[2] / "docs" / "screenshots"
_PAGE = "/jetstream/"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 800}
_LIGHTNESS = """element => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = getComputedStyle(element.ownerDocument.documentElement).backgroundColor;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data[0] / 255;
}"""


class Browsing:
    """
    What people have open in a test.

    :param browser: the browser
    :param url: where Airflow is
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self.url = url
        self.complaints: list[str] = []
        self._expected: list[str] = []
        self._contexts: list[BrowserContext] = []

    def expect_complaint(self, part: str) -> None:
        """
        Put up with what a browser says about an answer that the test brings about.

        :param part: of the text
        """
        self._expected.append(part)

    def open(self, address: str = "", *, user: str = "admin", airflow: bool = False, **options: Any) -> Page:
        """
        Open a page as a user who is logged in.

        :param address: behind the monitor's, such as ``#/queues``; behind Airflow's with ``airflow``
        :param user: who it is
        :param airflow: open a page of Airflow's own
        :param options: of the browser's context
        """
        context = self._browser.new_context(**{"viewport": DESKTOP, "color_scheme": "light"} | options)
        self._contexts.append(context)
        client = AirflowClient(self.url, user, user)
        context.add_cookies([{"name": "_token", "value": client.token(), "url": self.url, "httpOnly": True}])
        client.close()
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", self._listen)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.goto(f"{self.url}/{address}" if airflow else f"{self.url}{_PAGE}{address}")
        return page

    def close(self) -> None:
        """Close every page, and fail where one complained."""
        for context in self._contexts:
            context.close()
        found = [each for each in self.complaints if not any(part in each for part in self._expected)]
        assert not found, found

    def _listen(self, message: ConsoleMessage) -> None:
        own = _PAGE in message.location["url"]
        if (message.type == "error" and own) or "Content Security Policy" in message.text:
            self.complaints.append(f"{message.type}: {message.text} ({message.location['url']})")


def picture(page: Page, name: str, *, whole: bool = False) -> None:
    """
    Keep pictures of a page for the documentation, light and dark, where they are asked for.

    :param page: the page
    :param name: of the files
    :param whole: all of the page, rather than what fits the window
    """
    if os.environ.get("SCREENSHOTS") != "1":
        return
    _PICTURES.mkdir(parents=True, exist_ok=True)
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.wait_for_timeout(300)
        page.screenshot(path=_PICTURES / f"{name}-{scheme}.png", full_page=whole)


def row(page: Page | Frame, name: str) -> Locator:
    """
    Find the row of a table by what it says.

    :param page: the page, or the frame
    :param name: a part of what it says
    """
    return page.get_by_role("row").filter(has_text=name)


def cell(page: Page | Frame, name: str, label: str) -> Locator:
    """
    Find a cell.

    :param page: the page, or the frame
    :param name: a part of what its row says
    :param label: its column
    """
    return row(page, name).locator(f'td[data-label="{label}"]')


def lightness(page: Page | FrameLocator) -> float:
    """
    Tell how light the background is.

    :param page: the page, or the frame
    """
    return float(page.locator("body").evaluate(_LIGHTNESS))
