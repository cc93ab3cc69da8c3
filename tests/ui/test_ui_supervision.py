"""What a person supervises on the page: results that are true, states with their evidence, jobs, pauses, edits."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from playwright.sync_api import expect
from ui_browsing import row
from ui_steps import blocking, wait_for_letters, with_connection, working

from testbed.dead_letters import make_terminated_letters
from testbed.queues import make_queue, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection

TWO = [
    {"name": name, "filter_subject": f"lanes.jobs.{name}", "max_deliver": 3, "ack_wait": "30s"}
    for name in ("north", "south")
]


def made(settings: ConnectionSettings, name: str, **fields: object) -> WorkQueue:
    queue: WorkQueue = blocking(with_connection(settings, make_queue, name, **fields))
    return queue


def dead(settings: ConnectionSettings, queue: WorkQueue, bodies: list[str]) -> list[int]:
    terminated = with_connection(settings, make_terminated_letters, queue, bodies, reason="no such account")
    sequences: list[int] = blocking(terminated)
    return sequences


def test_a_partition_without_a_worker_is_shown_with_its_evidence(
    browsing: Browsing, settings: ConnectionSettings
) -> None:
    queue = made(settings, "lanes", consumers=TWO)
    for kind in ("north", "south"):
        blocking(with_connection(settings, publish_jobs, queue, ["a lorry"] * 4, kind=kind))
    with working(settings, queue):
        page = browsing.open()
        state = row(page, "lanes").locator('td[data-label="State"]')
        expect(state).to_have_text("Unserved")
        page.get_by_role("link", name="lanes", exact=True).click()
        findings = page.get_by_role("list", name="Findings")
        expect(findings).to_contain_text("south")
        expect(findings).to_contain_text("4")
        south = page.get_by_role("table", name="Consumers").get_by_role("row").filter(has_text="south")
        expect(south.locator('td[data-label="State"]')).to_contain_text("Unserved")
        expect(south.locator(".evidence")).not_to_be_empty()
        page.goto("about:blank")


def test_pending_jobs_can_be_looked_at(browsing: Browsing, settings: ConnectionSettings) -> None:
    queue = made(settings, "dispatches")
    blocking(with_connection(settings, publish_jobs, queue, ['{"parcel": 1.10}', "second", "third"]))
    page = browsing.open("#/queues/nats_default/dispatches")
    page.get_by_role("navigation", name="Parts of the queue").get_by_role("link", name="Jobs").click()
    table = page.get_by_role("table", name="Jobs")
    expect(table.locator("tbody tr")).to_have_count(3)
    page.get_by_title("1, stream sequence 1", exact=True).first.click()
    expect(page.get_by_label("Payload", exact=True)).to_have_text('{"parcel": 1.10}')
    page.go_back()
    page.get_by_role("button", name="In flight").click()
    expect(page.get_by_text("No job in this state")).to_be_visible()
    expect(page).to_have_url(re.compile("state=delivered"))


def test_a_running_job_shows_how_far_it_is_and_how_its_attempts_failed(
    browsing: Browsing, settings: ConnectionSettings
) -> None:
    queue = made(settings, "presses", attempts=True, consumer={"max_deliver": 2, "ack_wait": "2s"})
    done = threading.Event()

    def print_pages(job: Delivery) -> None:
        if job.attempt == 1:
            raise ValueError("out of paper")
        job.progress(0.4, "page 12 of 30")
        done.wait(60)
        raise ValueError("out of ink")

    blocking(with_connection(settings, publish_jobs, queue, ["a book"]))
    with working(settings, queue, print_pages):
        page = browsing.open("#/queues/nats_default/presses/jobs?state=delivered")
        last = page.get_by_role("table", name="Jobs").locator('td[data-label="Last attempt"]')
        expect(last).to_contain_text("40 %, page 12 of 30", timeout=30_000)
        expect(last).to_contain_text(re.compile("just now|ago"))
        page.get_by_title("1, stream sequence 1", exact=True).first.click()
        attempts = page.get_by_role("list", name="Attempts").get_by_role("listitem")
        expect(attempts).to_have_count(2)
        expect(attempts.first).to_contain_text("attempt 1: ValueError: out of paper")
        expect(attempts.last).to_contain_text("attempt 2: 40 %, page 12 of 30")
        done.set()
        blocking(wait_for_letters(settings, queue, 1))
    page.goto(f"{browsing.url}/jetstream/#/queues/nats_default/presses/letters/1")
    expect(attempts.first).to_contain_text("attempt 1: ValueError: out of paper")
    expect(attempts.last).to_contain_text("attempt 2: ValueError: out of ink")


def test_a_job_that_waits_is_retried_and_another_one_given_up(browsing: Browsing, settings: ConnectionSettings) -> None:
    queue = made(settings, "looms", attempts=True, consumer={"max_deliver": 3, "ack_wait": "1h", "backoff": ["1h"]})

    def weave(_: Delivery) -> None:
        raise ValueError("out of yarn")

    blocking(with_connection(settings, publish_jobs, queue, ["a carpet", "a scarf"]))
    with working(settings, queue, weave):
        page = browsing.open("#/queues/nats_default/looms/jobs?state=delivered")
        carpet, scarf = (
            page.get_by_role("row").filter(has=page.get_by_title(f"{number}, stream sequence {number}", exact=True))
            for number in (1, 2)
        )
        expect(carpet.get_by_role("button", name="Retry now: job 1")).to_be_visible(timeout=30_000)
        expect(scarf.get_by_role("button", name="Give up: job 2")).to_be_visible(timeout=30_000)
    dialog = page.get_by_role("dialog")
    carpet.get_by_role("button", name="Retry now: job 1").click()
    expect(dialog).to_contain_text("A job that may be running is left alone")
    dialog.get_by_label("Why").fill("yarn has come")
    dialog.get_by_role("button", name="Retry now", exact=True).click()
    expect(dialog).to_be_hidden()
    expect(carpet).to_contain_text("retried, by ")
    expect(carpet).to_contain_text(": yarn has come")
    (message,) = blocking(with_connection(settings, pull_jobs, queue, 1))
    assert (message.metadata.sequence.stream, message.metadata.num_delivered) == (1, 2)
    scarf.get_by_role("button", name="Give up: job 2").click()
    dialog.get_by_label("Why").fill("out of fashion")
    dialog.get_by_role("button", name="Give up", exact=True).click()
    expect(dialog).to_be_hidden()
    expect(scarf).to_be_hidden()
    blocking(wait_for_letters(settings, queue, 1))
    # The page asks again where its own scan is older than the letter.
    browsing.expect_error("looms/letters/2")
    page.goto(f"{browsing.url}/jetstream/#/queues/nats_default/looms/letters/2")
    expect(page.locator("main")).to_contain_text(": out of fashion")
    expect(page.locator("main")).to_contain_text("out of yarn")


def test_a_consumer_is_paused_and_resumed(browsing: Browsing, settings: ConnectionSettings) -> None:
    queue = made(settings, "ferries")
    blocking(with_connection(settings, publish_jobs, queue, ["a ferry"]))
    page = browsing.open("#/queues/nats_default/ferries")
    name = queue.consumers[0].name
    page.get_by_role("button", name=f"Pause {name}").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Why").fill("storm")
    dialog.get_by_role("button", name="Pause", exact=True).click()
    expect(dialog).to_be_hidden()
    consumers = page.get_by_role("table", name="Consumers")
    expect(consumers).to_contain_text("Paused")
    assert blocking(with_connection(settings, consumer_info, "ferries", name))["paused"]
    page.get_by_role("button", name=f"Resume {name}").click()
    dialog.get_by_role("button", name="Resume", exact=True).click()
    expect(dialog).to_be_hidden()
    expect(consumers).not_to_contain_text("Paused")
    assert not blocking(with_connection(settings, consumer_info, "ferries", name)).get("paused")


async def consumer_info(connection: NatsPyConnection, stream: str, consumer: str) -> dict[str, object]:
    return dict(await connection.api(f"CONSUMER.INFO.{stream}.{consumer}"))


def test_letters_are_searched_in_their_bodies(browsing: Browsing, settings: ConnectionSettings) -> None:
    queue = made(settings, "tickets")
    dead(settings, queue, [f'{{"seat": "row {number}"}}' for number in range(12)])
    page = browsing.open("#/queues/nats_default/tickets/letters")
    expect(page.locator("main")).to_contain_text("12 letters match")
    page.get_by_role("searchbox", name="Find letters").fill('"row 7"')
    page.get_by_role("button", name="Find", exact=True).click()
    found = page.get_by_role("table", name="Found letters")
    expect(found.locator("tbody tr")).to_have_count(1)
    expect(found).to_contain_text("body")
    page.reload()
    expect(found.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("searchbox", name="Find letters")).to_have_value('"row 7"')


def test_a_diagnosis_names_cause_and_advice(browsing: Browsing, settings: ConnectionSettings) -> None:
    queue = made(settings, "invoices")
    dead(settings, queue, ["1", "2", "3"])
    page = browsing.open("#/queues/nats_default/invoices/dead")
    page.get_by_role("button", name="Diagnosis").click()
    diagnosis = page.get_by_label("Diagnosis", exact=True).and_(page.locator("section"))
    expect(diagnosis).to_contain_text("3 dead letters")
    expect(diagnosis).to_contain_text("no such account")
    expect(diagnosis.locator(".cause .notes li").first).to_be_visible()
    page.reload()
    expect(diagnosis).to_contain_text("3 dead letters")
