"""The page in a browser, on the Airflow that the other tests of Airflow use."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import async_playwright, expect

from testbed.airflow_client import AirflowClient
from testbed.dead_letters import make_terminated_letters
from testbed.queues import make_queue

if TYPE_CHECKING:
    from playwright._impl._api_structures import SetCookieParam

    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection


@pytest.mark.smoke
@pytest.mark.browser
@pytest.mark.group("Airflow")
async def test_the_page_shows_a_queue_and_why_its_jobs_died(airflow: Airflow, connection: NatsPyConnection) -> None:
    queue = await make_queue(connection, "browsed")
    await make_terminated_letters(connection, queue, ["a", "b"], reason="no such customer")
    client = AirflowClient(airflow.url, "admin", "admin")
    token: SetCookieParam = {"name": "_token", "value": client.token(), "url": airflow.url, "httpOnly": True}
    client.close()
    async with async_playwright() as playwright:
        # Tests run as root in containers, where Chromium has no sandbox of its own.
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = await browser.new_context()
        await context.add_cookies([token])
        page = await context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        await page.goto(f"{airflow.url}/jetstream/")
        dead = page.get_by_role("row").filter(has_text="browsed").locator('td[data-label="Dead"]')
        await expect(dead).to_contain_text("2", timeout=60_000)
        await dead.get_by_role("link").click()
        await expect(page.get_by_role("row").filter(has_text="no such customer")).to_contain_text("2", timeout=60_000)
        await browser.close()
    assert errors == []
