"""The view of all queues: live numbers, search, polling, and a server that is away."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playwright.sync_api import expect
from ui_browsing import cell, row
from ui_steps import blocking, with_connection, working

from airflow_provider_jetstream.jetstream import connection_settings
from testbed.queues import make_queue, publish_jobs

if TYPE_CHECKING:
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import Connection, ConnectionSettings
    from testbed.nats_server import NatsServer


def test_the_numbers_of_a_queue_are_live(browsing: Browsing, settings: ConnectionSettings) -> None:
    queue = blocking(with_connection(settings, make_queue, "parcels", max_msgs=40))
    page = browsing.open()
    expect(cell(page, "parcels", "Pending")).to_have_text("0")
    expect(cell(page, "parcels", "State")).to_have_text("Idle")
    blocking(with_connection(settings, publish_jobs, queue, ["a parcel"] * 37))
    expect(cell(page, "parcels", "Pending")).to_have_text("37")
    expect(cell(page, "parcels", "State")).to_have_text("Stuck")
    expect(cell(page, "parcels", "Limit")).to_have_text("93 %")
    page.get_by_role("link", name="parcels", exact=True).click()
    expect(page.get_by_role("heading", name="parcels")).to_be_visible()
    expect(page.get_by_text("no open pull")).to_be_visible()
    with working(settings, queue):
        expect(page.locator(".tile").filter(has_text="Pending").locator("strong")).to_have_text("0")
        page.get_by_role("link", name="JetStream").click()
        expect(cell(page, "parcels", "State")).to_have_text("Idle")
        expect(cell(page, "parcels", "Pulls")).to_have_text("1")
    assert page.get_by_role("img", name="Pending, last hour").count()


def test_an_account_is_made_by_a_button_and_names_the_jobs_that_are_gone(
    browsing: Browsing, settings: ConnectionSettings
) -> None:
    queue = blocking(with_connection(settings, make_queue, "ledgers", consumer={"sample_freq": "100%"}))
    blocking(with_connection(settings, publish_jobs, queue, ["a", "b", "c"]))
    blocking(with_connection(settings, delete_job, "ledgers", 2))
    page = browsing.open()
    page.get_by_role("link", name="ledgers", exact=True).click()
    section = page.locator("section").filter(has_text="Jobs that are gone")
    expect(section).to_contain_text("No account was made yet")
    section.get_by_role("button", name="Account for them").click()
    expect(section).to_contain_text("1: 2")


async def delete_job(connection: Connection, queue: str, sequence: int) -> None:
    await connection.api(f"STREAM.MSG.DELETE.{queue}", {"seq": sequence})


def test_a_server_that_is_away_is_shown_until_it_is_back(browsing: Browsing, fragile_nats: NatsServer) -> None:
    settings = connection_settings({"servers": (fragile_nats.url,), "timeout": 5})
    blocking(with_connection(settings, make_queue, "letterbox"))
    page = browsing.open()
    expect(row(page, "letterbox")).to_be_visible()
    fragile_nats.stop()
    notice = page.get_by_role("alert").filter(has_text="The server of nats_fragile is away")
    expect(notice).to_be_visible()
    expect(notice).to_contain_text("are from")
    expect(row(page, "letterbox")).to_be_visible()
    fragile_nats.start()
    expect(notice).to_be_hidden()


def test_queues_can_be_found_and_sorted(browsing: Browsing, settings: ConnectionSettings, shop: str) -> None:
    for name in ("alpha", "omega"):
        blocking(with_connection(settings, make_queue, name))
    page = browsing.open()
    names = page.locator("th.head a")
    expect(row(page, "omega")).to_be_visible()
    idle = names.all_inner_texts()
    assert idle.index("store") < idle.index("alpha") < idle.index("omega")
    page.get_by_role("button", name="Queue").click()
    expect(names.first).to_have_text("alpha")
    page.get_by_role("button", name="Queue").click()
    expect(names.last).to_have_text("alpha")
    page.get_by_role("button", name="Needs attention").click()
    expect(row(page, "omega")).to_be_hidden()
    expect(row(page, "store")).to_be_visible()
    page.get_by_role("button", name="Needs attention").click()
    page.get_by_role("searchbox").fill("omeg")
    expect(names).to_have_text(["omega"])
    page.get_by_role("searchbox").fill("nothing of that name")
    expect(page.get_by_text("No queue matches")).to_be_visible()


def test_the_page_polls_only_while_it_is_visible_and_live(browsing: Browsing) -> None:
    page = browsing.open()
    expect(page.get_by_role("table", name="Queues")).to_be_visible()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(200)
    requests.clear()
    page.wait_for_timeout(1500)
    assert not requests
    with page.expect_request("**/api/snapshot"):
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.get_by_role("button", name="Live").click()
    page.wait_for_timeout(200)
    requests.clear()
    page.wait_for_timeout(1500)
    assert not requests
    with page.expect_request("**/api/snapshot"):
        page.get_by_role("button", name="Paused").click()


def test_the_dashboard_has_a_card(browsing: Browsing, shop: str) -> None:
    page = browsing.open(airflow=True)
    frame = page.frame_locator('iframe[title="JetStream"]')
    letters = frame.locator(".tile").filter(has_text="Dead letters").locator("strong")
    expect(letters).not_to_have_text("0")
    # The frame shows the whole card and nothing else.
    expect(frame.get_by_role("table")).to_have_count(0)
    page.wait_for_function(
        """() => {
            const frame = document.querySelector('iframe[title="JetStream"]');
            const page = frame.contentDocument;
            return page.querySelector(".tile") && page.documentElement.scrollHeight <= frame.clientHeight;
        }"""
    )
    frame.get_by_role("link", name="JetStream").click()
    expect(page).to_have_url(re.compile("/plugin/jetstream"))
    expect(page.frame_locator("iframe").get_by_role("table", name="Queues")).to_be_visible()
