"""Letters with names as people give them, what the address keeps, Airflow's zone, and bodies as they are stored."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect
from ui_browsing import row
from ui_steps import blocking, dead_settlements, settlement_id, with_connection

from airflow_provider_jetstream.jetstream import Job, publish
from testbed.queues import exhaust_deliveries, make_queue, wait_for_entries

if TYPE_CHECKING:
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings

QUEUE = "settlements"
ADDRESS = f"#/queues/nats_default/{QUEUE}"
BODY = '{"amount": 1.10, "currency": "EUR", "currency": "CHF"}'
BODIES = [BODY, *(f'{{"amount": {number}.50, "currency": "EUR"}}' for number in range(119))]


def job_name(sequence: int) -> str:
    return settlement_id(sequence - 1)


@pytest.fixture(scope="module", autouse=True)
def letters(settings: ConnectionSettings) -> list[int]:
    return blocking(with_connection(settings, dead_settlements, QUEUE, BODIES))


def test_real_names_fit_the_table_of_letters(browsing: Browsing) -> None:
    page = browsing.open(f"{ADDRESS}/letters")
    table = page.get_by_role("table", name="Letters")
    expect(table.locator("tbody tr")).to_have_count(50)
    expect(table).to_contain_text("5f0f1f6e-9a9d-4e5c-8a8b-1f0c8e0f7a88")
    for line in table.locator("tbody tr").all()[:5]:
        box, job = line.bounding_box(), line.locator("th").bounding_box()
        assert box is not None
        assert job is not None
        assert box["height"] < 110
        assert job["width"] > 150


def test_page_and_order_survive_a_reload(browsing: Browsing) -> None:
    page = browsing.open(f"{ADDRESS}/letters")
    expect(page.get_by_text("Page 1 of 3")).to_be_visible()
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("Page 2 of 3")).to_be_visible()
    expect(row(page, job_name(51))).to_be_visible()
    page.reload()
    expect(page.get_by_text("Page 2 of 3")).to_be_visible()
    expect(row(page, job_name(51))).to_be_visible()
    page.get_by_role("columnheader", name="Job").get_by_role("button").click()
    expect(page.locator("th.head .name").first).to_have_text(job_name(1))
    expect(page).to_have_url(re.compile("sort=sequence"))
    page.reload()
    expect(page.locator("th.head .name").first).to_have_text(job_name(1))
    page.go_back()
    expect(page.get_by_text("Page 2 of 3")).to_be_visible()


def test_times_are_in_airflows_zone(browsing: Browsing, letters: list[int]) -> None:
    page = browsing.open(f"{ADDRESS}/letters/{letters[0]}", timezone_id="America/Los_Angeles")
    facts = page.locator(".facts > div").filter(has_text="Stored")
    expect(facts).to_contain_text(re.compile("P[SD]T|GMT-[78]"))
    # Where Airflow's own page stores what the user has chosen.
    page.evaluate("localStorage.setItem('timezone', JSON.stringify('Asia/Kolkata'))")
    page.reload()
    expect(facts).to_contain_text("GMT+5:30")


def test_a_body_is_shown_and_copied_as_it_is_stored(browsing: Browsing, letters: list[int]) -> None:
    page = browsing.open(f"{ADDRESS}/letters/{letters[0]}", permissions=["clipboard-read", "clipboard-write"])
    payload = page.get_by_label("Payload", exact=True)
    expect(payload).to_have_text(BODY)
    page.get_by_role("button", name="Copy the payload").click()
    expect(page.get_by_role("button", name="Copy the payload")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == BODY
    page.get_by_role("button", name="Indented").click()
    expect(payload).to_contain_text('"amount": 1.10,\n')
    expect(payload).to_contain_text('"currency": "CHF"')


async def _dead_unique_job(connection: Any, name: str) -> None:
    queue = await make_queue(connection, name)
    await publish(connection, queue, [Job("a job", unique="customer 17")], subject=f"{name}.jobs.sync")
    await exhaust_deliveries(connection, queue, 1)
    await wait_for_entries(connection, queue, 1)


def test_a_letter_shows_its_unique_key(browsing: Browsing, settings: ConnectionSettings) -> None:
    blocking(with_connection(settings, _dead_unique_job, "customers"))
    page = browsing.open("#/queues/nats_default/customers/letters/1")
    headers = page.get_by_role("table", name="Headers")
    expect(headers.get_by_role("row").filter(has_text="Job-Unique")).to_contain_text("customer 17")
