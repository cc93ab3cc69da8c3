"""Every view, light and dark, on a desk and on a phone: no violation that axe finds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from ui_browsing import DESKTOP, PHONE

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from ui_browsing import Browsing

STORE = "#/queues/nats_default/store"
VIEWS = ("#/queues", STORE, f"{STORE}/dead", f"{STORE}/letters", f"{STORE}/jobs", f"{STORE}/redrives")
_AXE = Axe()


def violations(page: Page) -> list[str]:
    found = _AXE.run(page).response["violations"]
    return [f"{item['id']}: {item['help']}: {item['nodes'][0]['html'][:200]}" for item in found]


def check(page: Page) -> None:
    # Bones and spinners are there only while a view loads.
    expect(page.locator(".loading")).to_have_count(0)
    assert violations(page) == []


# Colours differ by the scheme and the layout by the width: two of the four combinations have all of them.
@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESKTOP), ("dark", PHONE)], ids=["desk", "phone"])
def test_no_view_has_a_violation(browsing: Browsing, shop: str, scheme: str, viewport: dict[str, int]) -> None:
    browsing.expect_error("404")
    page = browsing.open(viewport=viewport, color_scheme=scheme)
    expect(page.get_by_role("table", name="Queues")).to_be_visible()
    for address in VIEWS:
        page.goto(f"{browsing.url}/jetstream/{address}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        check(page)
    page.goto(f"{browsing.url}/jetstream/{STORE}/letters")
    page.locator("th.head a").first.click()
    expect(page.get_by_label("Payload", exact=True)).to_be_visible()
    check(page)
    page.goto(f"{browsing.url}/jetstream/{STORE}/dead")
    page.get_by_role("button", name=re.compile("Redrive all of them")).click()
    expect(page.get_by_role("dialog")).to_contain_text("match now")
    check(page)
    page.goto(f"{browsing.url}/jetstream/#/jobs?dag_id=shop&run_id={shop.replace('+', '%2B')}")
    expect(page.get_by_role("heading", name="Jobs of this run")).to_be_visible()
    check(page)
