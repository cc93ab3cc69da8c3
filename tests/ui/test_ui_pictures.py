"""The pictures of the documentation: live queues with names as people give them. ``make screenshots`` takes them."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from settlements import settle
from ui_browsing import PICTURES, TAKES_PICTURES, picture, row
from ui_steps import blocking, wait_for, with_connection, working

from airflow_provider_jetstream.jetstream import WorkQueue, discover_queue, provision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Locator, Page
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.skipif(not TAKES_PICTURES, reason="only make screenshots takes pictures")

SETTLEMENTS = "#/queues/nats_default/card-settlements"
SLOW = 90_000


def declared(name: str, *consumers: str) -> WorkQueue:
    """Declare a queue whose consumers divide its jobs by region."""
    rooms = [
        {"name": consumer, "filter_subject": f"{name}.{consumer}.>", "ack_wait": "30s", "max_deliver": 3}
        for consumer in consumers
    ]
    return WorkQueue(
        name=name,
        subjects=[f"{name}.>"],
        consumers=rooms,
        max_msgs=5_000,
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
    )


INVOICES = declared("invoice-pdfs", "renderer")
MAILS = declared("customer-emails", "europe", "americas")
EXPORTS = declared("nightly-exports", "warehouse")


async def fill(connection: NatsPyConnection) -> None:
    """Provision the queues, and publish what their workers do for some minutes."""
    jetstream = connection.client.jetstream()
    for queue, regions, count in ((INVOICES, ("renderer",), 4_000), (MAILS, ("europe", "americas"), 900)):
        await provision(connection, queue)
        for number in range(count):
            region = regions[number % len(regions)]
            body = json.dumps({"customer": 70_000 + number, "day": "2026-11-22", "acquirer": "none"})
            await jetstream.publish(f"{queue.name}.{region}.{number}", body.encode())
    await provision(connection, EXPORTS)


@pytest.fixture(scope="module")
def night(airflow: Airflow, settings: ConnectionSettings) -> Iterator[str]:
    """The run that published the payments, with all queues at work."""
    blocking(with_connection(settings, fill))
    airflow.wait_for_dags("settle_cards", timeout=120)
    run_id = airflow.trigger("settle_cards")
    assert airflow.wait_for_run("settle_cards", run_id, timeout=300)["state"] == "success"
    cards = blocking(with_connection(settings, discover_queue, "card-settlements"))
    with ExitStack() as workers:
        for queue, consumer in ((cards, "settler"), (INVOICES, "renderer"), (MAILS, "europe")):
            workers.enter_context(working(settings, queue, settle, consumer=consumer))
        yield run_id


def test_pictures_of_the_page(browsing: Browsing, night: str) -> None:
    page = browsing.open("#/queues/nats_default/card-settlements/dead")
    expect(row(page, "AcquirerTimeoutError")).to_contain_text("36", timeout=SLOW)
    page.goto(f"{browsing.url}/jetstream/")
    expect(row(page, "customer-emails").locator('td[data-label="State"]')).to_have_text("Unserved", timeout=SLOW)
    wait_for_samples(page, browsing.url, 5)
    page.reload()
    expect(row(page, "customer-emails").locator('td[data-label="State"]')).to_have_text("Unserved", timeout=SLOW)
    picture(page, "queues")
    page.goto(f"{browsing.url}/jetstream/{SETTLEMENTS}/dead?diagnose=yes")
    expect(page.locator(".cause").first).to_be_visible(timeout=SLOW)
    picture(page, "dead-letters", whole=True)
    page.goto(f"{browsing.url}/jetstream/{SETTLEMENTS}/letters")
    expect(page.get_by_role("table", name="Letters")).to_be_visible()
    page.locator("th.head a").first.click()
    expect(page.get_by_label("Payload", exact=True)).to_be_visible()
    picture(page, "letter", whole=True)


def wait_for_samples(page: Page, url: str, count: int) -> None:
    """Wait until the charts have lines."""
    for _ in range(600):
        detail = page.request.get(f"{url}/jetstream/api/queues/nats_default/customer-emails").json()
        if sum(point["pending"] is not None for point in detail["history"]) >= count:
            return
        page.wait_for_timeout(500)
    raise AssertionError(f"expected {count} samples, found {detail['history']}")


def test_pictures_of_a_redrive(browsing: Browsing, night: str) -> None:
    page = browsing.open(f"{SETTLEMENTS}/dead")
    row(page, "AcquirerTimeoutError").get_by_role("button", name=re.compile("Redrive")).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("36 letters match now")
    dialog.get_by_label("Why").fill("worldline is back, INC-20417")
    if dialog.get_by_label("Sizes").count():
        dialog.get_by_label("Sizes").fill("5, rest")
    picture(page, "redrive")
    dialog.get_by_role("button", name="Redrive 36 letters").click()
    link = page.get_by_role("link", name="Its redrive")
    expect(link).to_be_visible(timeout=SLOW)
    link.click()
    expect(page.locator(".tile").filter(has_text="Redriven").locator("strong")).to_have_text("36", timeout=SLOW)


def test_pictures_inside_airflow(browsing: Browsing, night: str) -> None:
    page = browsing.open(airflow=True)
    airflow_picture(page, "dashboard", page.frame_locator('iframe[title="JetStream"]').locator(".tile").first)
    page.goto(f"{browsing.url}/dags/settle_cards/runs/{night.replace('+', '%2B')}")
    page.get_by_role("link", name="JetStream jobs").click()
    airflow_picture(page, "run-tab", page.get_by_role("table", name="Queues with jobs"))


def test_picture_of_the_assets(browsing: Browsing, airflow: Airflow) -> None:
    # The DAGs needn't run for it.
    wait_for(lambda: airflow.dag("dead_letter_watch"), 120)
    asset = wait_for(lambda: airflow.api("GET", "assets?name_pattern=invoices_dead")["assets"], 120)[0]
    page = browsing.open(airflow=True)
    page.goto(f"{browsing.url}/assets/{asset['id']}")
    airflow_picture(page, "assets", page.get_by_text("dead_letter_watch").first)


def airflow_picture(page: Page, name: str, shown: Locator) -> None:
    """Take pictures of a page of Airflow's own, which has a theme of its own."""
    for theme in ("dark", "light"):
        page.evaluate("theme => localStorage.setItem('theme', theme)", theme)
        page.reload()
        expect(page.locator("html")).to_have_class(re.compile(theme))
        expect(shown).to_be_visible(timeout=SLOW)
        # Airflow's own numbers come one by one.
        page.wait_for_timeout(2_000)
        page.screenshot(path=PICTURES / f"{name}-{theme}.png")
