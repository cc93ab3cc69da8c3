"""A night walked by somebody who has only the page: 40,000 letters of three causes in two queues, alert to report."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect
from ui_browsing import cell, row, tile
from ui_steps import blocking, wait_for_letters, with_connection, working

from airflow_provider_jetstream.jetstream import WorkQueue, provision
from benchmarks.many_letters import NAK, ManyJob, let_die
from testbed.queues import CONSUMER

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings

# Letters that every form of this test has room for; the causes' shares are those of 40,000.
BUSY, CLOSED, UNPRINTED = 20_000, 8_000, 12_000
SLOW = 240_000


def declared(name: str) -> WorkQueue:
    consumer = {"name": CONSUMER, "max_deliver": 1, "ack_wait": "30s", "max_ack_pending": -1}
    return WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[consumer],
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
    )


PAYMENTS, INVOICES = declared("night-payments"), declared("night-invoices")


def jobs(queue: WorkQueue, what: str, count: int, answer: bytes) -> list[ManyJob]:
    subject = f"{queue.name}.jobs.{what}"
    return [ManyJob(subject, b'{"amount": 1}', f"{what}-{number}", answer) for number in range(count)]


async def die(connection: Any) -> None:
    for queue in (PAYMENTS, INVOICES):
        await provision(connection, queue)
    await let_die(connection, PAYMENTS, jobs(PAYMENTS, "card", BUSY, NAK))
    await let_die(connection, PAYMENTS, jobs(PAYMENTS, "debit", CLOSED, b"+TERM the account is closed"))
    await let_die(connection, INVOICES, jobs(INVOICES, "pdf", UNPRINTED, b"+TERM the printer is out of paper"))


class Walk:
    """Clicks and counts them; a view that didn't help is a wrong turn."""

    def __init__(self) -> None:
        self.clicks = 0

    def click(self, target: Locator) -> None:
        target.click(timeout=SLOW)
        self.clicks += 1


def redrive(page: Page, walk: Walk, button: Locator, count: int, why: str) -> None:
    """Redrive letters; the canary goes first, and what became of all is said where it was started."""
    walk.click(button)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"{count:,} letters match now", timeout=SLOW)
    expect(dialog.get_by_label("Sizes")).to_have_value("10, rest")
    dialog.get_by_label("Why").fill(why)
    walk.click(dialog.get_by_role("button", name=f"Redrive {count:,} letters"))
    notice = page.locator(".runs")
    expect(notice.get_by_role("list", name="Waves")).to_contain_text(
        "10 of the first 10 letters completed", timeout=SLOW
    )
    expect(notice).to_contain_text(f"{count:,} completed since", timeout=SLOW)


@pytest.mark.nightly
def test_forty_thousand_letters_are_decided_by_ten_clicks(browsing: Browsing, settings: ConnectionSettings) -> None:
    blocking(with_connection(settings, die))
    blocking(wait_for_letters(settings, PAYMENTS, BUSY + CLOSED))
    walk = Walk()
    # A count that takes longer than proxies wait goes on, and is asked for again by the page.
    browsing.expect_error("503")
    page = browsing.open()
    # The list alone says what died, lately and of what.
    for queue, count in ((PAYMENTS, BUSY + CLOSED), (INVOICES, UNPRINTED)):
        expect(cell(page, queue.name, "Dead")).to_contain_text(f"{count:,}", timeout=SLOW)
        expect(row(page, queue.name).get_by_role("img", name="Died in the last hour")).to_be_visible(timeout=SLOW)
    expect(row(page, PAYMENTS.name)).to_contain_text("terminated by a worker")
    walk.click(cell(page, PAYMENTS.name, "Dead").get_by_role("link"))
    for reason in ("used up its deliveries", "terminated by a worker"):
        expect(cell(page, reason, "What to do")).to_contain_text("the last one died", timeout=SLOW)
    with working(settings, PAYMENTS, lambda _: None), working(settings, INVOICES, lambda _: None):
        busy = row(page, "used up its deliveries").get_by_role("button", name=re.compile("Redrive"))
        redrive(page, walk, busy, BUSY, "the bank answers again")
        walk.click(row(page, "the account is closed").get_by_role("button", name=re.compile("Park")))
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(f"{CLOSED:,} letters match now", timeout=SLOW)
        dialog.get_by_label("Why").fill("to be refunded by hand")
        walk.click(dialog.get_by_role("button", name=f"Park {CLOSED:,} letters"))
        expect(page.locator(".runs")).to_contain_text(f"{CLOSED:,} letters of {PAYMENTS.name} parked", timeout=SLOW)
        expect(page.get_by_text("No dead letters")).to_be_visible(timeout=SLOW)
        walk.click(page.get_by_role("navigation", name="Breadcrumb").get_by_role("link", name="JetStream"))
        walk.click(cell(page, INVOICES.name, "Dead").get_by_role("link"))
        printing = row(page, "out of paper").get_by_role("button", name=re.compile("Redrive"))
        redrive(page, walk, printing, UNPRINTED, "there is paper")
    # The report: what was selected, by whom and why, and what became of each.
    walk.click(page.locator(".runs").get_by_role("link", name="Its redrive").first)
    expect(tile(page, "Completed after redrive")).to_have_text(f"{UNPRINTED:,}", timeout=SLOW)
    expect(page.locator("main")).to_contain_text("there is paper")
    expect(page.locator("main")).not_to_contain_text("unknown outcome")
    assert walk.clicks == 10
    page.goto("about:blank")
