"""Light and dark, as Airflow has it and as the system has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from ui_browsing import lightness, picture

if TYPE_CHECKING:
    from ui_browsing import Browsing


@pytest.mark.parametrize(("scheme", "light"), [("light", True), ("dark", False)])
def test_opened_by_itself_it_is_as_the_system_has_it(browsing: Browsing, scheme: str, *, light: bool) -> None:
    page = browsing.open(color_scheme=scheme)
    expect(page.get_by_role("heading", name="Queues")).to_be_visible()
    assert (lightness(page) > 0.5) == light


def test_inside_airflow_it_follows_airflow(browsing: Browsing) -> None:
    page = browsing.open("plugin/jetstream", airflow=True)
    frame = page.frame_locator("iframe")
    expect(frame.get_by_role("heading", name="Queues")).to_be_visible()
    theirs = page.locator("html")
    for theme, light in (("dark", False), ("light", True)):
        theirs.evaluate("(root, theme) => { root.classList.remove('light', 'dark'); root.classList.add(theme) }", theme)
        expect(frame.locator("html")).to_have_class(theme)
        assert (lightness(frame) > 0.5) == light


def test_the_overview_of_a_queue(browsing: Browsing, shop: str) -> None:
    page = browsing.open("#/queues/nats_default/store")
    expect(page.get_by_role("img", name="Jobs, last hour")).to_be_visible()
    expect(page.locator(".trend canvas")).to_have_count(2)
    expect(page.get_by_text("open request")).to_be_visible()
    picture(page, "queue", whole=True)
