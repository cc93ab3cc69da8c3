"""A redrive in waves: it stops at its gate, where a person resumes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect
from ui_steps import blocking, wait_for_letters, with_connection, working

from testbed.queues import make_queue, publish_jobs

if TYPE_CHECKING:
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from airflow_provider_jetstream.worker import Delivery

SLOW = 60_000


def test_a_redrive_stops_at_its_gate_and_is_resumed(browsing: Browsing, settings: ConnectionSettings) -> None:
    queue = blocking(with_connection(settings, make_queue, "couriers"))
    broken = [True]

    def deliver(_: Delivery) -> None:
        if broken:
            raise ConnectionError("the road is closed")

    with working(settings, queue, deliver):
        blocking(with_connection(settings, publish_jobs, queue, [f"parcel {number}" for number in range(9)]))
        blocking(wait_for_letters(settings, queue, 9))
        page = browsing.open("#/queues/nats_default/couriers/dead")
        page.get_by_role("button", name="Redrive all of them").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("9 letters match now")
        dialog.get_by_label("Sizes").fill("3, rest")
        dialog.get_by_role("button", name="Redrive 9 letters").click()
        # The canary goes on where it was started.
        canary = page.get_by_role("list", name="Waves")
        expect(canary).to_contain_text("0 of the first 3 letters completed, 3 died again", timeout=SLOW)
        expect(canary).to_contain_text("Redrive the other 6?")
        expect(page.locator(".runs").get_by_role("button", name="Resume")).to_be_visible()
        page.get_by_role("link", name="Its redrive").click(timeout=SLOW)
        expect(page.get_by_text("At a gate", exact=True)).to_be_visible(timeout=SLOW)
        waves = page.get_by_role("table", name="Waves")
        expect(waves.locator('td[data-label="Died again"]').first).to_have_text("3")
        expect(waves).to_contain_text("the road is closed")
        broken.clear()
        page.locator(".runs").get_by_role("button", name="Resume").click()
        dialog.get_by_label("Why").fill("the road is open")
        dialog.get_by_role("button", name="Resume", exact=True).click()
        expect(page.get_by_role("list", name="Controls")).to_contain_text("the road is open")
        expect(page.get_by_role("list", name="Controls")).to_contain_text("by admin")
        expect(page.get_by_text("Finished", exact=True)).to_be_visible(timeout=2 * SLOW)
        completed = page.locator(".tile").filter(has_text="Completed after redrive").locator("strong")
        expect(completed).to_have_text("9", timeout=SLOW)
        page.goto("about:blank")
