"""Counting, redriving and parking, with and without the permission to act."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from playwright.sync_api import expect
from ui_browsing import PHONE, row
from ui_steps import blocking, dead_orders, dead_settlements, with_connection

from airflow_provider_jetstream.jetstream import Origin

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow

STORE = "#/queues/nats_default/store"
DAG = "jetstream_redrive"
SLOW = 60_000


def test_a_viewer_sees_no_body_and_every_button_is_disabled(browsing: Browsing, shop: str) -> None:
    page = browsing.open(f"{STORE}/dead", user="viewer")
    expect(row(page, "BankBusyError")).to_contain_text("6")
    buttons = page.get_by_role("button", name=re.compile("Redrive|Park|Discard|Requeue"))
    expect(buttons).to_have_count(4)
    for button in buttons.all():
        expect(button).to_be_disabled()
    expect(page.get_by_text(f"permission to trigger the DAG {DAG}")).to_be_visible()
    page.get_by_role("link", name="Show 6 letters").click()
    page.locator("th.head a").first.click()
    expect(page.get_by_role("button", name="Redrive")).to_be_disabled()
    expect(page.get_by_text("Payloads are hidden from your role")).to_be_visible()
    expect(page.get_by_label("Payload", exact=True)).to_have_count(0)


def test_a_group_is_parked_with_the_keyboard(
    browsing: Browsing, settings: ConnectionSettings, airflow: Airflow
) -> None:
    with dead_orders(settings, "returns"):
        page = browsing.open("#/queues")
        park_with_keys(page)
        # Leaves the page before the queue is deleted: the page reads its queue again every few seconds.
        page.goto("about:blank")
    assert airflow.runs(DAG)[-1]["conf"]["why"] == "a person has to inspect it"


def park_with_keys(page: Page) -> None:
    """Find the malformed orders, open and close the dialog, and park them."""
    tab_to(page, "link", "returns")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Consumers")).to_be_visible()
    tab_to(page, "link", "Dead letters")
    page.keyboard.press("Enter")
    expect(row(page, "MalformedOrderError")).to_be_visible()
    tab_to(page, "button", "Park 2 letters")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("2 letters match now")
    expect(dialog.get_by_label("Why")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert "Park 2 letters" in str(page.evaluate("document.activeElement.ariaLabel"))
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("2 letters match now")
    page.keyboard.type("a person has to inspect it")
    tab_to(page, "button", "Park 2 letters", at_most=4)
    page.keyboard.press("Enter")
    expect(page.get_by_text("2 letters of returns parked")).to_be_visible(timeout=SLOW)
    expect(row(page, "MalformedOrderError")).to_have_count(0)
    tab_to(page, "link", "Parked")
    page.keyboard.press("Enter")
    expect(row(page, "MalformedOrderError")).to_contain_text("2")
    row(page, "MalformedOrderError").get_by_role("link").first.click()
    page.locator("th.head a").first.click()
    expect(page.get_by_text("a person has to inspect it").first).to_be_visible()


def test_a_group_is_discarded_and_brought_back_from_a_letter_and_from_the_redrive(
    browsing: Browsing, settings: ConnectionSettings, airflow: Airflow
) -> None:
    with dead_orders(settings, "refunds"):
        page = browsing.open("#/queues/nats_default/refunds/dead")
        dialog = page.get_by_role("dialog")
        row(page, "MalformedOrderError").get_by_role("button", name="Discard 2 letters").click()
        expect(dialog).to_contain_text("2 letters match now")
        dialog.get_by_label("Why").fill("orders of a test shop")
        dialog.get_by_role("button", name="Discard 2 letters").click()
        expect(page.get_by_text("2 letters of refunds discarded")).to_be_visible(timeout=SLOW)
        expect(row(page, "MalformedOrderError")).to_have_count(0)
        conf = airflow.runs(DAG)[-1]["conf"]
        assert (conf["action"], conf["why"]) == ("discard", "orders of a test shop")

        page.goto(f"{browsing.url}/jetstream/#/queues/nats_default/refunds/letters/5")
        expect(page.get_by_text("It isn't a dead letter any more: it was discarded")).to_be_visible()
        expect(page.get_by_text("discarded, orders of a test shop").first).to_be_visible()
        page.get_by_role("button", name="Undo the discard of this letter").click()
        expect(dialog).to_contain_text("1 letter matches now")
        dialog.get_by_role("button", name="Undo the discard 1 letter").click()
        expect(page.get_by_text("1 letter of refunds brought back")).to_be_visible(timeout=SLOW)

        page.goto(f"{browsing.url}/jetstream/#/queues/nats_default/refunds/redrives")
        row(page, "orders of a test shop").get_by_role("link").first.click()
        expect(page.get_by_text("0 letters redriven, 2 discarded").first).to_be_visible()
        page.get_by_role("button", name="Undo the discard of this redrive").click()
        expect(dialog).to_contain_text("1 letter matches now")
        dialog.get_by_role("button", name="Undo the discard 1 letter").click()
        expect(dialog).to_be_hidden()
        page.goto(f"{browsing.url}/jetstream/#/queues/nats_default/refunds/dead?parked=true")
        expect(row(page, "MalformedOrderError")).to_contain_text("2", timeout=SLOW)
        # Leaves the page before the queue is deleted.
        page.goto("about:blank")


def test_many_letters_are_edited_after_the_difference_of_samples(
    browsing: Browsing, settings: ConnectionSettings, airflow: Airflow
) -> None:
    with dead_orders(settings, "exchanges"):
        page = browsing.open("#/queues/nats_default/exchanges/dead")
        page.get_by_role("button", name="Edit and retry all of them").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("JSON Patch").fill('{"op": "replace"')
        dialog.get_by_role("button", name="Show the difference").click()
        expect(dialog).to_contain_text("This is no JSON")
        dialog.get_by_label("JSON Patch").fill('[{"op": "change", "path": "/amount"}]')
        dialog.get_by_role("button", name="Show the difference").click()
        expect(dialog).to_contain_text("expected an op (add, copy, move, remove, replace, test)")
        # The browser itself reports the refusal.
        (refused,) = browsing.errors
        assert "422" in refused
        browsing.errors.clear()
        patch = '[{"op":"test","path":"/amount","value":"1,5"},{"op":"replace","path":"/amount","value":1.50}]'
        dialog.get_by_label("JSON Patch").fill(patch)
        dialog.get_by_role("button", name="Show the difference").click()
        expect(dialog).to_contain_text("2 letters would change, 4 can't", timeout=SLOW)
        expect(dialog).to_contain_text("4 letters would stay: operation 1 of the patch, test /amount")
        difference = dialog.get_by_label("Difference of letter 5")
        expect(difference.locator(".removed")).to_have_text(re.compile('"amount": "1,5"'))
        expect(difference.locator(".added")).to_have_text(re.compile(r'"amount": 1\.50'))
        dialog.get_by_label("Why").fill("a comma in the amount")
        dialog.get_by_role("button", name="Redrive 2 letters with this change").click()
        expect(dialog).to_be_hidden()
        # The busy ones don't fit the patch, so the run fails and names them; they stay as they were.
        expect(row(page, "MalformedOrderError")).to_have_count(0, timeout=SLOW)
        expect(row(page, "BankBusyError")).to_contain_text("4")
        assert airflow.runs(DAG)[-1]["conf"]["patch"] == patch
        page.goto(f"{browsing.url}/jetstream/#/queues/nats_default/exchanges/letters/5")
        expect(page.get_by_text("It isn't a dead letter any more: it was redriven")).to_be_visible()
        expect(page.locator(".changes")).to_contain_text('"after":1.5')


def test_the_letters_of_a_dag_are_redriven_in_all_its_queues(browsing: Browsing, settings: ConnectionSettings) -> None:
    publisher = Origin("nightly_refunds", "manual__2026-11-22T02:00:00+00:00", "refund")
    for queue, count in (("refunds-eu", 2), ("refunds-us", 1)):
        bodies = [f'{{"refund": {number}}}' for number in range(count)]
        blocking(with_connection(settings, dead_settlements, queue, bodies, publisher))
    page = browsing.open("#/dag?dag_id=nightly_refunds")
    expect(page.locator("main")).to_contain_text("3 letters in 2 queues")
    page.get_by_role("button", name="Redrive all letters of this DAG").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("3 letters match now")
    expect(dialog).to_contain_text("refunds-eu dead letters: DAG nightly_refunds: 2 letters")
    # A look at some of them says whether they are the right ones.
    expect(dialog.get_by_role("list", name="Some of these letters").get_by_role("listitem")).to_have_count(3)
    dialog.get_by_label("Why").fill("the bank is back")
    dialog.get_by_role("button", name="Redrive 3 letters").click()
    expect(page.get_by_text("2 letters of refunds-eu redriven")).to_be_visible(timeout=SLOW)
    expect(page.get_by_text("1 letter of refunds-us redriven")).to_be_visible(timeout=SLOW)
    page.goto("about:blank")


def test_the_page_works_on_a_phone(browsing: Browsing, shop: str) -> None:
    page = browsing.open("#/queues", viewport=PHONE, has_touch=True, is_mobile=True)
    for address in ("", "/nats_default/store", "/nats_default/store/dead", "/nats_default/store/letters"):
        page.goto(f"{browsing.url}/jetstream/#/queues{address}")
        expect(page.get_by_role("table").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]

    page.goto(f"{browsing.url}/jetstream/{STORE}/dead")
    page.get_by_role("button", name="Redrive all of them").tap()
    expect(page.get_by_role("dialog")).to_contain_text("match")
    box = page.get_by_role("dialog").bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE["width"]


def tab_to(page: Page, role: str, name: str, *, at_most: int = 60) -> None:
    """Press Tab until an element has the focus."""
    element = page.get_by_role(role, name=re.compile(f"^{name}"))  # type: ignore[arg-type]
    expect(element.first).to_be_visible()
    for _ in range(at_most):
        page.keyboard.press("Tab")
        if any(match.evaluate("element => element === document.activeElement") for match in element.all()):
            return
    raise AssertionError(f"{role} {name} can't be reached with the Tab key")
