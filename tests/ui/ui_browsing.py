"""Pages of the monitor in a real browser, and the errors that the browser reports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.airflow_client import AirflowClient

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Frame, FrameLocator, Locator, Page

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "screenshots"
# Set by make screenshots.
TAKES_PICTURES = os.environ.get("SCREENSHOTS") == "1"
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
    """The pages that a test opens.

    :param url: the address of Airflow
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self.url = url
        self.errors: list[str] = []
        self._expected: list[str] = []
        self._contexts: list[BrowserContext] = []

    def expect_error(self, part: str) -> None:
        """Expect an error that contains a text."""
        self._expected.append(part)

    def open(self, address: str = "", *, user: str = "admin", airflow: bool = False, **options: Any) -> Page:
        """Open a page as a user who is logged in.

        :param address: relative to the monitor's, such as ``#/queues``; with ``airflow``, to Airflow's
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
        page.on("console", self._record)
        page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        page.goto(f"{self.url}/{address}" if airflow else f"{self.url}{_PAGE}{address}")
        return page

    def close(self) -> None:
        """Close every page; fail if the browser reported an unexpected error."""
        for context in self._contexts:
            context.close()
        unexpected = [error for error in self.errors if not any(part in error for part in self._expected)]
        assert not unexpected, unexpected

    def _record(self, message: ConsoleMessage) -> None:
        own = _PAGE in message.location["url"]
        if (message.type == "error" and own) or "Content Security Policy" in message.text:
            self.errors.append(f"{message.type}: {message.text} ({message.location['url']})")


def picture(page: Page, name: str, *, whole: bool = False) -> None:
    """Take screenshots of a page for the documentation, light and dark.

    :param whole: the whole page rather than the visible section
    """
    PICTURES.mkdir(parents=True, exist_ok=True)
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.wait_for_timeout(300)
        page.screenshot(path=PICTURES / f"{name}-{scheme}.png", full_page=whole)


def take(page: Page, name: str, *, whole: bool = True) -> None:
    """Take pictures for the documentation, when ``make screenshots`` asks for them.

    :param whole: the whole page rather than the visible section, beyond which a dialog doesn't cover the page
    """
    if TAKES_PICTURES:
        picture(page, name, whole=whole)


def tile(page: Page, label: str) -> Locator:
    """Return the number of a tile."""
    return page.locator(".tile").filter(has_text=label).locator("strong")


def row(page: Page | Frame | FrameLocator, name: str) -> Locator:
    """Return the row of a table that contains a text."""
    return page.get_by_role("row").filter(has_text=name)


def cell(page: Page | Frame | FrameLocator, name: str, label: str) -> Locator:
    """Return the cell of a column in the row that contains a text."""
    return row(page, name).locator(f'td[data-label="{label}"]')


def lightness(page: Page | FrameLocator) -> float:
    """Return the lightness of the background, from 0 to 1."""
    return float(page.locator("body").evaluate(_LIGHTNESS))
