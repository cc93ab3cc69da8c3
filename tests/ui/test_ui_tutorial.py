"""Goes through docs/tutorial.md as its reader does: the files, commands and labels are those of the page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from ui_browsing import row, take, tile
from ui_lesson import Lesson
from ui_steps import blocking, wait_for, wait_for_letters

from airflow_provider_jetstream.jetstream import WorkQueue
from testbed.terminal import terminal_env

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow

DAG_ID = "convert_sales"
SLOW = 60_000


@pytest.fixture
def folder(airflow: Airflow, tmp_path: Path) -> Path:
    """The reader's folder; its DAGs are those of the Airflow that these tests share."""
    # Where that Airflow has the DAG jetstream_redrive: the tutorial's file replaces it.
    (tmp_path / "dags").symlink_to(airflow.dags_folder / "example_dags")
    return tmp_path


@pytest.fixture
def lesson(folder: Path, settings: ConnectionSettings) -> Iterator[Lesson]:
    with Lesson("docs/tutorial.md", folder, terminal_env(settings.servers[0])) as opened:
        # tests/server/test_dev_command.py runs the first section.
        opened.skip_to("2. Declare a queue")
        yield opened


def test_the_tutorial(
    lesson: Lesson, folder: Path, airflow: Airflow, browsing: Browsing, settings: ConnectionSettings
) -> None:
    with lesson.section("2. Declare a queue"):
        lesson.write()
        lesson.run()
    with lesson.section("3. Write a worker"):
        lesson.write()
        lesson.start_worker()
    with lesson.section("4. Write a DAG"):
        lesson.write()
        lesson.write()
    with lesson.section("5. Run it"):
        page = run_the_dag(lesson, airflow, browsing)
        lesson.see_worker_print()
    blocking(wait_for_letters(settings, WorkQueue.load(folder / "dags" / "sales.yaml"), 5))
    with lesson.section("6. Find the dead letters and their causes"):
        page.goto(f"{browsing.url}/{lesson.path()}")
        find_the_causes(lesson, page)
        lesson.run()
    with lesson.section("7. Mend the worker"):
        lesson.stop_worker()
        lesson.write()
        lesson.start_worker()
    with lesson.section("8. Redrive one letter, then the rest"):
        redrive_in_two_waves(lesson, page)
    with lesson.section("9. Repair the last letter"):
        repair_the_last_letter(lesson, page)
        lesson.see_worker_print()
    with lesson.section("10. See that nothing is left"):
        lesson.run()
        lesson.run()
    assert lesson.rest == ["Where to go next"]
    assert airflow.import_errors() == []


def run_the_dag(lesson: Lesson, airflow: Airflow, browsing: Browsing) -> Page:
    # The tutorial's own Airflow doesn't pause new DAGs.
    airflow.wait_for_dags(DAG_ID)
    page = browsing.open(lesson.path(), airflow=True)
    # Its name for screen readers differs between versions of Airflow.
    trigger = page.get_by_test_id("trigger-dag-button").first
    expect(trigger).to_have_text(lesson.label("Trigger"))
    trigger.click()
    page.get_by_role("dialog").get_by_role("button", name=lesson.label("Trigger"), exact=True).click()
    (run,) = wait_for(lambda: airflow.runs(DAG_ID))
    run_id = str(run["dag_run_id"])
    assert airflow.wait_for_run(DAG_ID, run_id)["state"] == "failed"
    lesson.see(lambda: airflow.task_log(DAG_ID, run_id, "publish_sales"))
    return page


def find_the_causes(lesson: Lesson, page: Page) -> None:
    page.get_by_role("link", name=lesson.label("sales"), exact=True).click()
    open_dead_letters(lesson, page)
    expect(row(page, "ValueError")).to_contain_text("4", timeout=SLOW)
    expect(row(page, "KeyError")).to_contain_text("1")
    page.get_by_role("button", name=lesson.label("Diagnosis")).click()
    diagnosis = page.get_by_label("Diagnosis", exact=True).and_(page.locator("section"))
    for words in ("converter:convert", "don't redrive yet"):
        expect(diagnosis).to_contain_text(words, timeout=SLOW)
    take(page, "tutorial-diagnosis")
    letters = row(page, "ValueError").get_by_role("link", name="Show 4 letters")
    expect(letters).to_have_text(lesson.label("4"))
    letters.click()
    page.get_by_role("link", name=lesson.label("berlin"), exact=True).click()
    expect(page.get_by_label("Payload", exact=True)).to_contain_text(lesson.value('"total":"1249,00"'))
    expect(page.get_by_role("link", name=lesson.value("convert_sales.publish_sales"))).to_be_visible()


def open_dead_letters(lesson: Lesson, page: Page, where: str = "Parts of the queue") -> None:
    page.get_by_role("navigation", name=where).get_by_role("link", name=lesson.label("Dead letters")).click()


def redrive_in_two_waves(lesson: Lesson, page: Page) -> None:
    open_dead_letters(lesson, page, "Breadcrumb")
    redrive = row(page, "ValueError").get_by_role("button", name="Redrive 4 letters")
    expect(redrive).to_have_text(lesson.label("Redrive…"))
    redrive.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(lesson.label("Why")).fill(lesson.value("the worker reads decimal commas"))
    dialog.get_by_label(lesson.label("Sizes")).fill(lesson.value("1, rest"))
    dialog.get_by_role("button", name=lesson.label("Redrive 4 letters")).click()
    page.get_by_role("link", name=lesson.label("Its redrive")).click(timeout=SLOW)
    expect(page.get_by_text("Finished", exact=True)).to_be_visible(timeout=SLOW)
    expect(tile(page, "Completed after redrive")).to_have_text("4", timeout=SLOW)
    expect(page.get_by_role("table", name="Waves").locator('td[data-label="Completed"]')).to_have_text(["1", "3"])
    take(page, "tutorial-redrive")


def repair_the_last_letter(lesson: Lesson, page: Page) -> None:
    open_dead_letters(lesson, page)
    letters = row(page, "KeyError").get_by_role("link", name="Show 1 letter")
    expect(letters).to_have_text(lesson.label("1"))
    expect(row(page, "ValueError")).to_have_count(0)
    letters.click()
    page.get_by_role("link", name=lesson.label("porto"), exact=True).click()
    page.get_by_role("button", name=lesson.label("Edit and retry…")).click()
    dialog = page.get_by_role("dialog")
    body = dialog.get_by_label(lesson.label("Body"))
    body.fill(body.input_value().replace(lesson.value("EURO"), lesson.value("EUR")))
    dialog.get_by_label(lesson.label("Why")).fill(lesson.value("a typing error in Porto"))
    dialog.get_by_role("button", name=lesson.label("Show the difference")).click()
    difference = dialog.get_by_label("Difference of the body")
    expect(difference.locator(".removed")).to_have_text(re.compile('"EURO"'))
    expect(difference.locator(".added")).to_have_text(re.compile('"EUR"'))
    take(page, "tutorial-edit", whole=False)
    dialog.get_by_role("button", name=lesson.label("Redrive with this change")).click()
    expect(dialog).to_contain_text("Redriven with the change")
    dialog.get_by_role("button", name=lesson.label("Close")).click()
    audit = page.locator("section").filter(has=page.get_by_role("heading", name="Audit"))
    expect(audit).to_contain_text("a typing error in Porto")
    expect(audit).to_contain_text("admin")
