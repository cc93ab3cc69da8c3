"""Dead letters: groups, the letters of a group, one letter, and the link to its task."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote

from playwright.sync_api import expect
from ui_browsing import cell, lightness, row

if TYPE_CHECKING:
    from ui_browsing import Browsing

    from testbed.airflow import Airflow

STORE = "#/queues/nats_default/store"


def test_a_group_links_to_its_letters_and_a_letter_to_its_task(browsing: Browsing, shop: str) -> None:
    page = browsing.open()
    expect(cell(page, "store", "Dead")).to_contain_text("9")
    cell(page, "store", "Dead").get_by_role("link").click()
    expect(row(page, "BankBusyError")).to_contain_text("6")
    expect(row(page, "MalformedOrderError")).to_contain_text("2")
    expect(row(page, "terminated by a worker")).to_contain_text("1")
    row(page, "BankBusyError").get_by_role("link", name="Show 6 letters").click()
    expect(page.get_by_role("list", name="Filter")).to_contain_text("BankBusyError")
    expect(page.get_by_role("table", name="Letters").locator("tbody tr")).to_have_count(6)
    expect(row(page, "shop.publish")).to_have_count(6)
    page.locator("th.head a").first.click()
    expect(page.get_by_role("heading", name="Payload")).to_be_visible()
    expect(page.get_by_label("Payload", exact=True)).to_contain_text('"bank": "slow"')
    expect(row(page, "Airflow-Task")).to_have_count(1)
    expect(page.get_by_label("Traceback")).to_contain_text(re.compile(r"example_workers\.store, line \d+, in "))
    facts = page.locator(".facts > div")
    expect(facts.filter(has=page.get_by_text("Worker", exact=True))).to_contain_text("till")
    expect(facts.filter(has_text="Last attempt took")).to_contain_text(re.compile(r"\d s"))
    page.get_by_role("link", name="shop.publish").click()
    expect(page).to_have_url(re.compile(r"/dags/shop/runs/.+/tasks/publish"))
    # The task's log is what one click shows.
    expect(page.get_by_text("9 jobs").first).to_be_visible()


def test_a_task_has_a_link_to_its_own_dead_letters(browsing: Browsing, airflow: Airflow, shop: str) -> None:
    links = airflow.api("GET", f"dags/shop/dagRuns/{quote(shop)}/taskInstances/publish/links")["extra_links"]
    page = browsing.open()
    page.goto(links["JetStream dead letters"])
    frame = page.frame_locator("iframe")
    selected = frame.get_by_role("list", name="Filter")
    for value in ("shop", shop, "publish"):
        expect(selected).to_contain_text(value)
    expect(frame.get_by_role("table", name="Letters").locator("tbody tr")).to_have_count(9)


def test_links_work_inside_airflow(browsing: Browsing, shop: str) -> None:
    page = browsing.open("plugin/jetstream", airflow=True)
    frame = page.frame_locator("iframe")
    frame.locator("tr").filter(has_text="store").get_by_role("link", name="store", exact=True).click()
    frame.get_by_role("navigation", name="Parts of the queue").get_by_role("link", name="Dead letters").click()
    frame.get_by_role("link", name="Show 6 letters").click()
    frame.get_by_role("link", name="shop.publish").first.click()
    expect(page).to_have_url(re.compile(r"/dags/shop/runs/.+/tasks/publish"))
    expect(page.get_by_role("link", name="JetStream jobs").first).to_be_visible()
    page.go_back()
    expect(frame.get_by_role("table", name="Letters")).to_be_visible()
    # The address in the browser's bar opens the same view.
    page.reload()
    expect(frame.get_by_role("table", name="Letters")).to_be_visible()


def test_filters_and_groupings_are_part_of_the_address(browsing: Browsing, shop: str) -> None:
    page = browsing.open(f"{STORE}/dead")
    page.get_by_label("Fingerprint").uncheck()
    page.get_by_label("Subject").check()
    expect(row(page, "store.orders.web")).to_have_count(3)
    expect(page).to_have_url(re.compile("group_by=subject"))
    page.reload()
    expect(page.get_by_label("Fingerprint")).not_to_be_checked()
    expect(row(page, "store.orders.web")).to_have_count(3)
    expect(row(page, "terminated by a worker")).to_contain_text("JSONDecodeError")
    page.goto(f"{browsing.url}/jetstream/{STORE}/letters?reasons=terminated&subject=store.orders.*")
    letters = page.get_by_role("table", name="Letters").locator("tbody tr")
    expect(letters).to_have_count(1)
    page.get_by_role("link", name="Drop the filter on reason").click()
    expect(letters).to_have_count(9)
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    expect(page.get_by_role("button", name="Previous")).to_be_disabled()


def test_a_payload_is_only_shown_as_text(browsing: Browsing, shop: str) -> None:
    page = browsing.open(f"{STORE}/letters?reasons=terminated")
    page.locator("th.head a").first.click()
    expect(page.get_by_label("Payload", exact=True)).to_contain_text(
        "</pre><script>window.stolen = 1; alert(1)</script><img"
    )
    page.goto(f"{browsing.url}/jetstream/{STORE}/letters?error_class=example_workers.store.MalformedOrderError")
    page.locator("th.head a").first.click()
    expect(page.get_by_label("Payload", exact=True)).to_contain_text("<script>window.stolen = 1; alert(1)</script>")
    page.wait_for_timeout(300)
    assert page.evaluate("window.stolen") is None
    assert not page.locator("pre script, pre img").count()


def test_the_jobs_of_a_run_and_of_a_task(browsing: Browsing, shop: str) -> None:
    page = browsing.open(f"?dag_id=shop&run_id={shop.replace('+', '%2B')}&task_id=publish&map_index={{MAP_INDEX}}")
    expect(page.get_by_role("heading", name="Jobs of this task")).to_be_visible()
    expect(cell(page, "store", "Jobs")).to_have_text("9")
    expect(cell(page, "store", "Dead")).to_have_text("9")
    cell(page, "store", "Dead").get_by_role("link").click()
    expect(page.get_by_role("list", name="Filter")).to_contain_text("publish")
    expect(row(page, "BankBusyError")).to_contain_text("6")
    page = browsing.open(f"dags/shop/runs/{shop.replace('+', '%2B')}", airflow=True)
    page.get_by_role("link", name="JetStream jobs").click()
    # A part of Airflow's own page, in a shadow root.
    expect(page.get_by_role("heading", name="Jobs of this run")).to_be_visible()
    expect(page.locator("iframe")).to_have_count(0)
    for theme, light in (("dark", False), ("light", True)):
        page.locator("html").evaluate(
            "(root, theme) => { root.classList.remove('light', 'dark'); root.classList.add(theme) }", theme
        )
        expect(page.locator(f"div.{theme} #app")).to_have_count(1)
        assert (lightness(page) > 0.5) == light
    page.get_by_role("link", name="9 letters").click()
    expect(page).to_have_url(re.compile("/plugin/jetstream"))
    frame = page.frame_locator("iframe")
    expect(frame.get_by_role("list", name="Filter")).to_contain_text(shop)
    expect(row(frame, "BankBusyError")).to_contain_text("6")


def test_the_dead_letters_of_a_dag(browsing: Browsing, shop: str) -> None:
    page = browsing.open("dags/shop", airflow=True)
    page.get_by_role("link", name="JetStream letters").click()
    expect(page.get_by_role("heading", name="Dead letters of this DAG")).to_be_visible()
    table = page.get_by_role("table", name="Dead letters by queue and cause")
    expect(row(page, "BankBusyError")).to_contain_text("publish")
    expect(table.get_by_role("link", name="6 letters")).to_be_visible()
