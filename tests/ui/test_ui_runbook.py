"""Walks docs/runbook.md with a live queue: alert, diagnosis, a canary that stops, the fix, waves, report."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from ui_browsing import take, tile
from ui_steps import ROOT, blocking, wait_for, wait_for_letters, with_connection

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream import WorkQueue, list_redrives, provision
from testbed.prometheus import exporter, prometheus
from testbed.terminal import terminal_env

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page
    from ui_browsing import Browsing

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow
    from testbed.prometheus import Prometheus

RUNBOOK = ROOT / "docs" / "runbook.md"
QUEUE = ROOT / "tests" / "ui" / "dags" / "orders.yaml"
PAGE = "#/queues/nats_default/orders"
# Of 320 orders: totals above a thousand, and closed accounts among the others.
UNREAD, CLOSED = 192, 22
SLOW = 60_000


def read_steps() -> dict[str, list[str]]:
    """Return the commands of each step of the runbook."""
    steps: dict[str, list[str]] = {}
    for part in re.split(r"^(?=\d\. )", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]:
        title = re.match(r"\d\. \*\*([^.*]+)", part)
        assert title, part
        steps[title[1]] = re.findall(r"^ +(jetstream-queue .*)$", part, re.MULTILINE)
    return steps


class Terminal:
    """Runs the runbook's commands, in the order in which it prints them.

    :param url: the server's address
    """

    def __init__(self, url: str) -> None:
        self.steps = read_steps()
        self.redrive = ""
        self._env = terminal_env(url) | {"LOGNAME": "ann", "COLUMNS": "200"}

    def run(self, step: str, *, code: int = 0) -> str:
        """Run the next command of a step; return what it prints.

        :param code: the expected exit code
        """
        process = self.start(step)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == code, out
        return out

    def start(self, step: str) -> subprocess.Popen[str]:
        """Start the next command of a step."""
        words = shlex.split(self.steps[step].pop(0))[1:]
        words = [self.redrive if word == "ID" else word for word in words]
        return subprocess.Popen(
            [sys.executable, "-m", "airflow_provider_jetstream.command.program", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
        )


@contextmanager
def release(version: str, settings: ConnectionSettings, logs: Path) -> Iterator[None]:
    """Run a worker with a release of the handler."""
    code = ROOT / "tests" / "ui" / "releases" / f"v{version.replace('.', '_')}"
    env = {**os.environ, "NATS_URL": settings.servers[0], "PYTHONPATH": f"{ROOT}{os.pathsep}{code}"}
    worker = start_worker(
        f"payments-{version}",
        queue=QUEUE,
        consumer="payments",
        handler="order_payments:charge",
        env=env,
        logs=logs,
        concurrency=8,
    )
    try:
        yield
    finally:
        worker.terminate(10)


@pytest.fixture
def terminal(settings: ConnectionSettings) -> Terminal:
    return Terminal(settings.servers[0])


def test_the_night_of_the_runbook(
    airflow: Airflow, browsing: Browsing, settings: ConnectionSettings, terminal: Terminal, tmp_path: Path
) -> None:
    queue = WorkQueue.load(QUEUE)
    blocking(with_connection(settings, provision, queue))
    with exporter(settings.servers[0]) as port, prometheus(port, tmp_path / "prometheus") as alerts:
        known = 'jetstream_queue_dead_letter_entries_stored_total{queue="orders"}'
        wait_for(lambda: alerts.values(known) == [0])
        with release("2026.47", settings, tmp_path):
            airflow.wait_for_dags("charge_orders")
            run = airflow.trigger("charge_orders")
            assert airflow.wait_for_run("charge_orders", run)["state"] == "success"
            blocking(wait_for_letters(settings, queue, UNREAD + CLOSED))
            see_the_alert(browsing, alerts, terminal)
            page = browsing.open(f"{PAGE}/dead?diagnose=yes")
            read_the_diagnosis(page, terminal)
            redriving = terminal.start("A few first")
            stop_at_the_gate(page, terminal, alerts, browsing.url)
        assert terminal.steps.pop("Mend the cause") == []
        with release("2026.48", settings, tmp_path):
            go_on_in_waves(page, terminal)
            report, _ = redriving.communicate(timeout=120)
        assert redriving.returncode == 0, report
        read_the_report(page, terminal)
    (redrive,) = blocking(with_connection(settings, list_redrives, queue))
    assert (redrive.outcomes.completed, redrive.outcomes.died_again) == (UNREAD, 0)
    assert not any(terminal.steps.values()), "the walk leaves out commands of the runbook"


def see_the_alert(browsing: Browsing, alerts: Prometheus, terminal: Terminal) -> None:
    (alert,) = wait_for(lambda: alerts.firing().get("JetStreamManyDeadLetters"))
    assert alert["labels"]["queue"] == "orders"
    assert "jetstream-queue letters diagnose orders" in alert["annotations"]["description"]
    assert "orders" in terminal.run("Alert")
    assert "payments" in terminal.run("Alert")
    page = browsing.open("")
    orders = page.get_by_role("row").filter(has=page.get_by_role("link", name="orders", exact=True))
    expect(orders).to_contain_text(str(UNREAD + CLOSED), timeout=SLOW)
    take(page, "runbook-alert")


def read_the_diagnosis(page: Page, terminal: Terminal) -> None:
    text = terminal.run("Diagnosis", code=1)
    assert "ValueError in order_payments:parse_total" in text
    assert "90%" in text
    assert "still failing: don't redrive yet" in text
    assert "order_payments.AccountClosedError in order_payments:charge" in text
    assert len(terminal.run("Diagnosis").splitlines()) == 21
    letter = terminal.run("Diagnosis")
    assert '"order":"2026-11-48216"' in letter
    assert "could not convert string to float" in letter
    diagnosis = page.get_by_label("Diagnosis", exact=True).and_(page.locator("section"))
    for words in (
        f"{UNREAD + CLOSED} dead letters",
        "order_payments:parse_total",
        "don't redrive yet",
        "charge_orders",
    ):
        expect(diagnosis).to_contain_text(words, timeout=SLOW)
    take(page, "runbook-diagnosis")


def stop_at_the_gate(page: Page, terminal: Terminal, alerts: Prometheus, url: str) -> None:
    page.goto(f"{url}/jetstream/{PAGE}/redrives")
    expect(page.get_by_text("At a gate", exact=True)).to_be_visible(timeout=SLOW)
    shown = terminal.run("A few first")
    terminal.redrive = shown.splitlines()[1].split()[0]
    status = terminal.run("A few first")
    assert "0 completed after the redrive, 10 died again" in status
    assert "10 died of ValueError: could not convert string to float" in status
    page.goto(f"{url}/jetstream/{PAGE}/redrives/{terminal.redrive}")
    expect(tile(page, "Redriven")).to_have_text("10")
    expect(tile(page, "Died again")).to_have_text("10")
    expect(page.locator("main")).to_contain_text("10 letters redriven: 10 died again; of 10 jobs of wave 1,")
    expect(page.get_by_role("table", name="Waves")).to_contain_text("could not convert string to float")
    wait_for(lambda: alerts.firing().get("JetStreamRedriveDiesAgain"))
    take(page, "runbook-canary")


def go_on_in_waves(page: Page, terminal: Terminal) -> None:
    terminal.run("Waves")
    expect(page.get_by_text("Finished", exact=True)).to_be_visible(timeout=SLOW)
    expect(page.get_by_role("list", name="Controls")).to_contain_text("release 2026.48 reads totals above 1.000")


def read_the_report(page: Page, terminal: Terminal) -> None:
    text = terminal.run("Report")
    assert f"{UNREAD} completed after the redrive, 0 died again, 0 still running, 0 not known" in text
    assert "(INC-20417: totals are fixed)" in text
    assert "202 redriven (10 of them once more after they had died again), 0 parked" in text
    expect(tile(page, "Completed after redrive")).to_have_text(str(UNREAD))
    # Of the letters, not of the jobs.
    expect(page.locator(".tile").filter(has_text="Completed after redrive")).to_contain_text("100 %")
    expect(page.get_by_role("table", name="Waves").locator("tbody tr")).to_have_count(3)
    # Those of the canary came back once more: what became of them is known.
    done = f"202 letters redriven, 10 of them once more after they had died again: {UNREAD} completed after redrive"
    expect(page.locator("main")).to_contain_text(done)
    expect(page.locator("main")).not_to_contain_text("of unknown outcome")
    take(page, "runbook-report")
    left = terminal.run("Report", code=1)
    assert f"{CLOSED} dead letters, one place: order_payments.AccountClosedError" in left
