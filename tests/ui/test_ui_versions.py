"""The page in every minor release of Airflow that is supported, each in an environment of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from playwright.sync_api import expect
from ui_browsing import Browsing, lightness
from ui_steps import ROOT, blocking, with_connection

from airflow_provider_jetstream.jetstream import connection_settings
from testbed.airflow import Airflow
from testbed.dead_letters import make_terminated_letters
from testbed.environments import create_environment, lowest_python
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.queues import make_queue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, FrameLocator, Page

    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.nightly

LOCKED = "locked"
VERSIONS = os.environ.get("AIRFLOW_VERSIONS", f"3.1.8 3.2.2 {LOCKED}").split()
# Airflow 3.2's own API server doesn't start with later versions, though its metadata allows them.
OLDER_PACKAGES = ("cadwyn<8", "fastapi<0.137")
DAG = "jetstream_redrive"
QUEUE = "voyage"
SLOW = 90_000


async def fill(connection: NatsPyConnection) -> None:
    """Make a queue with three dead letters."""
    queue = await make_queue(connection, QUEUE)
    await make_terminated_letters(connection, queue, ["one", "two", "three"], reason="no such port")


@pytest.fixture(scope="module", params=VERSIONS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """An Airflow of that version, with a queue that has dead letters."""
    folder: Path = tmp_path_factory.mktemp(f"airflow-{request.param}")
    python = sys.executable
    if request.param != LOCKED:
        packages = [f"apache-airflow=={request.param}", *OLDER_PACKAGES, str(ROOT)]
        python = str(create_environment(folder / "venv", lowest_python(), packages))
    (folder / "dags").mkdir()
    shutil.copy(ROOT / "example_dags" / f"{DAG}.py", folder / "dags")
    with NatsServer(folder / "nats") as nats:
        blocking(with_connection(connection_settings({"servers": (nats.url,), "timeout": 5}), fill))
        connection = json.dumps({"conn_type": "nats", "host": LOOPBACK, "port": nats.port})
        instance = Airflow(
            folder / "home",
            folder / "dags",
            connections={"nats_default": connection},
            env={"AIRFLOW__JETSTREAM__MONITOR_REFRESH_SECONDS": "1"},
            python=python,
            path="/team",
        )
        instance.start(DAG)
        if request.param != LOCKED:
            assert instance.api("GET", "version")["version"] == request.param
        yield instance
        instance.stop()


@pytest.fixture
def browsing_other(browser: Browser, other: Airflow) -> Iterator[Browsing]:
    """Opens its pages."""
    opened = Browsing(browser, other.url)
    yield opened
    opened.close()


def test_the_page_is_shown_and_acts_from_within_airflow(other: Airflow, browsing_other: Browsing) -> None:
    assert other.api("GET", "plugins/importErrors")["import_errors"] == []
    page = browsing_other.open(airflow=True)
    card = page.frame_locator('iframe[title="JetStream"]')
    expect(card.locator(".tile").filter(has_text="Dead letters").locator("strong")).to_have_text("3")
    card.get_by_role("link", name="JetStream").click()
    expect(page).to_have_url(re.compile("/team/plugin/jetstream"))
    page.goto(other.url)
    page.get_by_role("button", name="Browse").click()
    page.get_by_role("menuitem", name="JetStream").click()
    frame = page.frame_locator("iframe")
    frame.get_by_role("link", name=QUEUE, exact=True).click()
    frame.get_by_role("navigation", name="Parts of the queue").get_by_role("link", name="Dead letters").click()
    group = frame.get_by_role("row").filter(has_text="terminated by a worker")
    group.get_by_role("button", name="Redrive 3 letters").click()
    dialog = frame.get_by_role("dialog")
    expect(dialog).to_contain_text("3 letters match now")
    dialog.get_by_label("Why").fill("the port is back")
    dialog.get_by_role("button", name="Redrive 3 letters").click()
    expect(frame.get_by_text(f"3 letters of {QUEUE} redriven")).to_be_visible(timeout=SLOW)
    # The page tells what the redrive did, which ends a moment before its run.
    run = other.wait_for_run(DAG, other.runs(DAG)[-1]["dag_run_id"])
    assert (run["state"], run["conf"]["why"]) == ("success", "the port is back")
    frame.get_by_role("link", name=f"run of {DAG}").click()
    expect(page).to_have_url(re.compile(f"/team/dags/{DAG}/runs/"))
    page.get_by_role("link", name="JetStream jobs").click()
    # Airflow 3.1 shows the tab in a frame, later ones as a part of their own page.
    has_frames = other.api("GET", "version")["version"].startswith("3.1.")
    tab: Page | FrameLocator = frame if has_frames else page
    expect(tab.get_by_role("heading", name="Jobs of this run")).to_be_visible()
    page.goto(f"{other.url}/dags/{DAG}/runs/{quote(run['dag_run_id'])}/tasks/redrive")
    page.get_by_role("link", name="JetStream jobs").click()
    expect(tab.get_by_role("heading", name="Jobs of this task")).to_be_visible()
    page.goto(f"{other.url}/dags/{DAG}")
    letters = page.get_by_role("link", name="JetStream letters")
    if has_frames:
        # It has no place for a view of a DAG.
        expect(page.get_by_role("link", name="Runs", exact=True).first).to_be_visible()
        expect(letters).to_have_count(0)
    else:
        letters.click()
        expect(tab.get_by_role("heading", name="Dead letters of this DAG")).to_be_visible()


def test_it_follows_airflows_theme(other: Airflow, browsing_other: Browsing) -> None:
    page = browsing_other.open("plugin/jetstream", airflow=True)
    frame = page.frame_locator("iframe")
    expect(frame.get_by_role("heading", name="Queues")).to_be_visible()
    for theme, light in (("dark", False), ("light", True)):
        page.evaluate("theme => localStorage.setItem('theme', theme)", theme)
        page.reload()
        expect(page.locator("html")).to_have_class(re.compile(theme))
        expect(frame.get_by_role("heading", name="Queues")).to_be_visible()
        assert (lightness(frame) > 0.5) == light
