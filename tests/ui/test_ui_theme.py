"""Light and dark: Airflow's theme inside Airflow, else the system's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from ui_browsing import lightness

if TYPE_CHECKING:
    from ui_browsing import Browsing


@pytest.mark.parametrize(("scheme", "light"), [("light", True), ("dark", False)])
def test_outside_airflow_it_has_the_systems_theme(browsing: Browsing, scheme: str, *, light: bool) -> None:
    page = browsing.open(color_scheme=scheme)
    expect(page.get_by_role("heading", name="Queues")).to_be_visible()
    assert (lightness(page) > 0.5) == light


def test_inside_airflow_it_has_airflows_theme(browsing: Browsing) -> None:
    page = browsing.open("plugin/jetstream", airflow=True)
    frame = page.frame_locator("iframe")
    expect(frame.get_by_role("heading", name="Queues")).to_be_visible()
    root = page.locator("html")
    for theme, light in (("dark", False), ("light", True)):
        root.evaluate("(root, theme) => { root.classList.remove('light', 'dark'); root.classList.add(theme) }", theme)
        expect(frame.locator("html")).to_have_class(theme)
        assert (lightness(frame) > 0.5) == light
