"""What one glance at the page says of a queue: dying, empty, unknown, on a phone; and no word that misleads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from ui_browsing import cell
from ui_served import served_page
from ui_steps import blocking, with_connection, working

from airflow_provider_jetstream.jetstream import connection_settings
from testbed import seams
from testbed.dead_letters import make_terminated_letters
from testbed.nats_server import NatsServer
from testbed.queues import make_queue, publish_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from airflow_provider_jetstream.worker import Delivery

ERROR = (
    "acquirer worldline answered 504 after three attempts: upstream connect error or disconnect before headers, twice"
)


@pytest.fixture(scope="module")
def own_nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def server_settings(own_nats: NatsServer) -> ConnectionSettings:
    return connection_settings({"servers": (own_nats.url,), "timeout": 5})


@pytest.fixture(scope="module")
def url(own_nats: NatsServer) -> Iterator[str]:
    with served_page(own_nats) as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield context.new_page()
    context.close()


def one_in_five_dies(delivery: Delivery) -> None:
    if delivery.sequence % 5 == 0:
        raise ValueError(ERROR)


def test_a_queue_whose_jobs_die_is_not_called_working_nor_idle(
    own_nats: NatsServer, server_settings: ConnectionSettings, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = blocking(with_connection(server_settings, make_queue, "dying", consumer={"max_deliver": 1}))
    blocking(with_connection(server_settings, publish_jobs, queue, ["job"] * 25))
    # A page of its own: its clock never goes back.
    with served_page(own_nats) as url, working(server_settings, queue, one_in_five_dies):
        page.goto(url)
        expect(cell(page, "dying", "State")).to_have_text("Dying", timeout=60_000)
        expect(cell(page, "dying", "Dead")).to_have_text("5 1/min", timeout=60_000)
        page.get_by_role("link", name="dying", exact=True).click()
        expect(page.get_by_role("list", name="Findings")).to_contain_text("a minute died in the last five minutes")
        # An hour later nothing has died for long, and its letters are still there.
        monkeypatch.setattr(seams.CLOCK_MOVED, 3600.0)
        page.goto(f"{url}#/queues")
        expect(cell(page, "dying", "State")).to_have_text("Dead letters", timeout=60_000)
        page.goto("about:blank")


def test_an_empty_queue_has_no_lower_bounds(url: str, server_settings: ConnectionSettings, page: Page) -> None:
    blocking(with_connection(server_settings, make_queue, "empty"))
    page.goto(f"{url}#/queues/nats_default/empty/dead")
    expect(page.get_by_text("No dead letters")).to_be_visible()
    expect(page.get_by_text("As of")).to_be_visible()
    expect(page.get_by_text("lower bounds")).to_have_count(0)


def test_a_queue_that_there_is_not_is_named_with_a_way_out(url: str, page: Page) -> None:
    page.goto(f"{url}#/queues/nats_default/nowhere")
    notice = page.locator(".notice").filter(has_text="Not found").first
    expect(notice).to_contain_text("nowhere")
    expect(notice).not_to_contain_text("api/")
    notice.get_by_role("link", name="All queues").click()
    expect(page.get_by_role("heading", name="Queues")).to_be_visible()


def test_letters_come_newest_first_with_whole_words(url: str, server_settings: ConnectionSettings, page: Page) -> None:
    queue = blocking(with_connection(server_settings, make_queue, "words"))
    for body in ("old", "new"):
        blocking(with_connection(server_settings, make_terminated_letters, queue, [body], reason=f"{body}: {ERROR}"))
    page.goto(f"{url}#/queues/nats_default/words/letters")
    errors = page.locator(".fault .message")
    expect(errors).to_have_count(2)
    shown = errors.all_inner_texts()
    assert [text.partition(":")[0] for text in shown] == ["new", "old"]
    for text in shown:
        assert set(text.removesuffix(" …").split()) <= {"new:", "old:", *ERROR.split()}, text
        assert errors.first.evaluate("element => element.scrollWidth <= element.clientWidth")


def test_each_tab_can_be_seen_on_a_phone(url: str, server_settings: ConnectionSettings, browser: Browser) -> None:
    blocking(with_connection(server_settings, make_queue, "phone"))
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(f"{url}#/queues/nats_default/phone")
    tabs = page.get_by_role("navigation", name="Parts of the queue").get_by_role("link")
    expect(tabs).to_have_text([re.compile(name) for name in ("Overview", "Dead letters", "Parked", "Redrives", "Jobs")])
    for tab in tabs.all():
        box = tab.bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
    context.close()


def test_a_groups_row_says_what_to_do_and_the_dialog_begins_with_it(
    url: str, server_settings: ConnectionSettings, page: Page
) -> None:
    queue = blocking(with_connection(server_settings, make_queue, "advised"))
    bodies = [f"job {number}" for number in range(14)]
    blocking(with_connection(server_settings, make_terminated_letters, queue, bodies, reason=ERROR))
    # Of Airflow's own API, the DAG alone is asked for.
    dag: dict[str, dict[str, dict[str, str]]] = {"params": {"waves": {}}}
    page.route("**/api/v2/dags/**", lambda route: route.fulfill(json=dag))
    page.goto(f"{url}#/queues/nats_default/advised/dead")
    advice = cell(page, "terminated by a worker", "What to do")
    expect(advice).to_contain_text("don't redrive yet")
    expect(advice.get_by_role("listitem").first).to_contain_text("the last one died")
    # What would do no good isn't the button that stands out.
    main = page.get_by_role("button", name="Redrive all of them")
    expect(main).not_to_have_class(re.compile("primary"))
    main.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("14 letters match now")
    expect(dialog.get_by_role("status")).to_contain_text("They would probably die again")
    expect(dialog).not_to_contain_text("Protocol")
    expect(dialog.get_by_label("Sizes")).to_have_value("10, rest")
    dialog.get_by_role("button", name="Cancel").click()
    # The words are a way into the group, too.
    page.get_by_role("link", name=ERROR[:30]).click()
    expect(page.locator("main")).to_contain_text("14 letters match")
