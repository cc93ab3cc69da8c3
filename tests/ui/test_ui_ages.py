"""What the page says to whoever opens it after hours, in a browser: nothing old looks like a number of now."""

from __future__ import annotations

import asyncio
import pkgutil
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect
from ui_browsing import cell, tile
from ui_served import served_page
from ui_steps import blocking, with_connection, working

from airflow_provider_jetstream.jetstream import Origin, connection_settings, redrive_dead_letters
from testbed import seams
from testbed.dead_letters import make_terminated_letters, sampled_dead, store_task, task_key
from testbed.face import stream_info
from testbed.nats_server import NatsServer
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, until_stored, wait_for_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from playwright.sync_api import Browser, Page

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

HOURS = 3 * 3600.0
AS_OF = re.compile(r"as of \d\d:\d\d")


@pytest.fixture(scope="module")
def own_nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def server_settings(own_nats: NatsServer) -> ConnectionSettings:
    return connection_settings({"servers": (own_nats.url,), "timeout": 5})


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield context.new_page()
    context.close()


@contextmanager
def held_scans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold each scan until the block ends."""
    go_on, pages = threading.Event(), pkgutil.resolve_name(seams.SCANNER_PAGES)

    async def held(*arguments: Any) -> AsyncIterator[Any]:
        await asyncio.to_thread(go_on.wait)
        async for page in pages(*arguments):
            yield page

    with monkeypatch.context() as patch:
        patch.setattr(seams.SCANNER_PAGES, held)
        try:
            yield
        finally:
            go_on.set()


async def until_sampled(connection: NatsPyConnection, queue: str, count: int) -> None:
    async def is_sampled() -> bool:
        return await sampled_dead(connection, queue) == count

    await eventually(is_sampled, 60)


def test_after_hours_the_first_view_shows_what_is_old_as_of_its_time(
    own_nats: NatsServer, server_settings: ConnectionSettings, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = blocking(with_connection(server_settings, make_queue, "night"))
    blocking(with_connection(server_settings, make_terminated_letters, queue, ["a", "b"]))
    with served_page(own_nats) as url:
        page.goto(url)
        expect(cell(page, "night", "Dead")).to_have_text(re.compile(r"^2"))
        expect(cell(page, "night", "State")).to_have_text("Dying")
        expect(tile(page, "Dead letters")).to_have_text("2")
        expect(page.locator(".tile").filter(has_text="Dead letters")).to_contain_text("all proved")
        page.goto("about:blank")
        # Nobody looks for three hours; another job dies, and the scan of it takes its time.
        blocking(with_connection(server_settings, make_terminated_letters, queue, ["c"]))
        with held_scans(monkeypatch):
            monkeypatch.setattr(seams.CLOCK_MOVED, HOURS)
            page.goto(url)
            expect(cell(page, "night", "Dead").locator(".old")).to_have_text(AS_OF)
            expect(tile(page, "Dead letters").locator(".old")).to_have_text(AS_OF)
            expect(page.locator(".tile").filter(has_text="Dead letters")).not_to_contain_text("all proved")
            # What was read just now is no old number.
            expect(cell(page, "night", "Pending").locator(".old")).to_have_count(0)
            page.goto(f"{url}#/queues/nats_default/night/dead")
            group = page.get_by_role("table", name="Groups of dead letters").get_by_role("rowheader")
            expect(group.locator(".old")).to_have_text("2")
            page.goto(url)
        expect(tile(page, "Dead letters")).to_have_text("3", timeout=60_000)
        expect(page.locator(".old")).to_have_count(0)


def test_after_hours_the_tab_of_a_dag_claims_nothing_that_is_old(
    own_nats: NatsServer, server_settings: ConnectionSettings, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = blocking(with_connection(server_settings, make_queue, "of_dags", consumer={"ack_wait": "30s"}))
    blocking(with_connection(server_settings, letter_of_dag, queue, "nightly", 1))
    nothing = page.get_by_text("No dead letters", exact=True)
    count = page.get_by_role("table", name="Dead letters by queue and cause").get_by_role("rowheader")
    with served_page(own_nats) as url:
        page.goto(f"{url}#/dag?dag_id=nightly")
        expect(count).to_have_text("1", timeout=60_000)
        page.goto(f"{url}#/dag?dag_id=weekly")
        expect(nothing).to_be_visible()
        page.goto("about:blank")
        # Nobody looks for three hours, in which a job of the other DAG dies; the scan of it takes its time.
        blocking(with_connection(server_settings, letter_of_dag, queue, "weekly", 2))
        with held_scans(monkeypatch):
            monkeypatch.setattr(seams.CLOCK_MOVED, HOURS)
            page.goto(f"{url}#/dag?dag_id=weekly")
            expect(page.get_by_role("status").filter(has_text="of_dags")).to_be_visible()
            expect(nothing).to_have_count(0)
            page.goto(f"{url}#/dag?dag_id=nightly")
            expect(count.locator(".old")).to_have_text(AS_OF)
        page.goto(f"{url}#/dag?dag_id=weekly")
        expect(count).to_have_text("1", timeout=60_000)
        expect(page.locator(".old")).to_have_count(0)


async def letter_of_dag(connection: NatsPyConnection, queue: WorkQueue, dag_id: str, entries: int) -> None:
    """Publish a job as a task of a DAG does, and terminate it; the queue has so many dead letters then."""
    origin = Origin(dag_id, "run", "send")
    created = (await stream_info(connection, queue.name))["created"]
    await store_task(connection, queue, origin, created=created, published=1)
    await publish_jobs(connection, queue, ["a"], headers={"Airflow-Task": task_key(origin)})
    for message in await pull_jobs(connection, queue, 1):
        await message.term()
    await wait_for_entries(connection, queue, entries)


def test_deaths_while_nobody_looks_are_in_the_first_view_and_its_chart(
    own_nats: NatsServer, server_settings: ConnectionSettings, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = blocking(with_connection(server_settings, make_queue, "charted"))
    with served_page(own_nats, sample_seconds=0.2) as url:
        page.goto(f"{url}#/queues/nats_default/charted")
        expect(page.get_by_role("img", name="Jobs, last hour")).to_have_attribute("aria-label", re.compile("Dead 0"))
        page.goto("about:blank")
        # Nobody looks for three hours.
        monkeypatch.setattr(seams.CLOCK_MOVED, HOURS)
        for count, body in enumerate("abc", 1):
            blocking(with_connection(server_settings, make_terminated_letters, queue, [body]))
            blocking(with_connection(server_settings, until_sampled, "charted", count))
        page.goto(f"{url}#/queues/nats_default/charted")
        chart = page.get_by_role("img", name="Jobs, last hour")
        expect(chart).to_have_attribute("aria-label", re.compile("Dead 3"))
        expect(tile(page, "Dead")).to_have_text("3")
        expect(page.locator(".old")).to_have_count(0)
        # Each number that it had meanwhile is on the line.
        history = page.request.get(f"{url}api/queues/nats_default/charted").json()["history"]
        assert {0, 1, 2, 3} <= {point["dead"] for point in history}


def test_hours_after_a_redrive_its_page_tells_what_became_of_each_letter(
    own_nats: NatsServer, server_settings: ConnectionSettings, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = blocking(with_connection(server_settings, make_queue, "mended"))
    letters = blocking(with_connection(server_settings, make_terminated_letters, queue, list("abc"), reason="no bank"))
    with served_page(own_nats) as url:
        page.goto(f"{url}#/queues/nats_default/mended/letters/{letters[0]}")
        expect(page.get_by_label("Payload", exact=True)).to_have_text("a")
        page.goto("about:blank")
        # By a program that awaits nothing, while nobody looks.
        blocking(with_connection(server_settings, redrive_dead_letters, queue))
        with working(server_settings, queue):
            blocking(with_connection(server_settings, until_stored, "mended", 0))
        monkeypatch.setattr(seams.CLOCK_MOVED, HOURS)
        page.goto(f"{url}#/queues/nats_default/mended/redrives")
        expect(page.get_by_role("table", name="Redrives").locator('td[data-label="Completed"]')).to_have_text("3")
        page.get_by_role("table", name="Redrives").get_by_role("link").first.click()
        expect(tile(page, "Completed after redrive")).to_have_text("3")
        expect(page.locator("main")).not_to_contain_text("unknown outcome")
        page.goto(f"{url}#/queues/nats_default/mended/letters/{letters[0]}")
        main = page.locator("main")
        expect(page.get_by_label("Payload", exact=True)).to_have_text("a")
        expect(main).to_contain_text(re.compile(r"job \d+ completed .* s after the redrive"))
        expect(main).to_contain_text("no bank")
        for false in ("no error was recorded", "not known any more", "isn't stored any more", "earlier stream"):
            expect(main).not_to_contain_text(false)


def test_a_server_that_is_away_has_no_live_numbers(
    own_nats: NatsServer, server_settings: ConnectionSettings, page: Page
) -> None:
    queue = blocking(with_connection(server_settings, make_queue, "away"))
    blocking(with_connection(server_settings, publish_jobs, queue, ["a"]))
    with served_page(own_nats) as url:
        page.goto(url)
        expect(page.get_by_role("button", name="Live")).to_be_visible()
        expect(cell(page, "away", "State")).to_have_text("Stuck")
        own_nats.stop()
        try:
            expect(page.get_by_role("button", name="No new numbers")).to_be_visible(timeout=60_000)
            expect(page.get_by_role("button", name="Live")).to_have_count(0)
            expect(cell(page, "away", "State")).to_have_text(AS_OF)
            # What can't be read isn't shown as what isn't there.
            for view in ("dag?dag_id=any", "jobs?dag_id=any&run_id=any&task_id=t"):
                page.goto(f"{url}#/{view}")
                expect(page.get_by_text("is away")).to_be_visible(timeout=60_000)
                expect(page.get_by_text(re.compile("No dead letters|No jobs are known"))).to_have_count(0)
            page.goto(url)
        finally:
            own_nats.start()
        expect(page.get_by_role("button", name="Live")).to_be_visible(timeout=60_000)


def test_a_flow_that_was_not_measured_is_not_shown_as_none(
    own_nats: NatsServer, server_settings: ConnectionSettings, page: Page
) -> None:
    blocking(with_connection(server_settings, make_queue, "still"))
    with served_page(own_nats, refresh_seconds=60) as url:
        page.goto(url)
        expect(tile(page, "Flowing")).to_have_text("\N{EN DASH}")
        expect(cell(page, "still", "Out")).to_have_text("\N{EN DASH}")
