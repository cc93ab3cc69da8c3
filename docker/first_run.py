"""Runs the example DAGs ``orders`` and ``dead_letter_pipeline`` once, prints the counts, and unpauses all example DAGs.

A later start finds the runs of the first one and starts none.
"""

import asyncio
import http.client
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from airflow_provider_jetstream.jetstream import (
    ConnectionSettings,
    Job,
    WorkQueue,
    connect,
    find_dead_letters,
    publish,
)

ORDERS, PIPELINE = "orders", "dead_letter_pipeline"
MALFORMED, BUSY, POISON = 60, 30, 10
PATIENCE = 900.0
TRIES = 8

Found = TypeVar("Found")


class FirstRunError(Exception):
    """Something isn't as expected; the message says what."""


class AirflowApi:
    """Airflow's REST API, as the user ``admin``.

    :param url: such as ``http://airflow-apiserver:8080``
    """

    def __init__(self, url: str, password: str) -> None:
        self._url = urllib.parse.urlsplit(url)
        self._headers = {"Content-Type": "application/json"}
        token = self.request("POST", "/auth/token", {"username": "admin", "password": password})["access_token"]
        self._headers["Authorization"] = f"Bearer {token}"

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Return the answer; a server that can't answer just now is asked again."""
        for _ in range(TRIES):
            status, content = self._request_once(method, path, body)
            if status < HTTPStatus.INTERNAL_SERVER_ERROR:
                break
            time.sleep(1)
        if status >= HTTPStatus.BAD_REQUEST:
            raise FirstRunError(f"{method} {path}: {status} {content.decode(errors='replace')[:500]}")
        return json.loads(content)

    def _request_once(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(str(self._url.hostname), self._url.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def dags(self) -> dict[str, dict[str, Any]]:
        """Return the DAGs that have been parsed, by id."""
        return {dag["dag_id"]: dag for dag in self.request("GET", "/api/v2/dags?limit=100")["dags"]}

    def unpause(self, dag_id: str) -> None:
        """Unpause a DAG."""
        self.request("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": False})

    def first_run(self, dag_id: str) -> dict[str, Any] | None:
        """Return the first run of a DAG, if there is one."""
        path = f"/api/v2/dags/{dag_id}/dagRuns?limit=1&order_by=run_after"
        return next(iter(self.request("GET", path)["dag_runs"]), None)

    def trigger(self, dag_id: str) -> None:
        """Start a run of a DAG."""
        self.request("POST", f"/api/v2/dags/{dag_id}/dagRuns", {"logical_date": None})

    def result(self, run: dict[str, Any], task_id: str) -> dict[str, Any]:
        """Return what a task of a run has returned."""
        task = f"{urllib.parse.quote(run['dag_run_id'])}/taskInstances/{task_id}"
        path = f"/api/v2/dags/{run['dag_id']}/dagRuns/{task}/xcomEntries/return_value"
        value: dict[str, Any] = self.request("GET", path)["value"]
        return value


def main(queue_file: str) -> int:
    """Return the exit code: 0 if both runs succeeded, now or at an earlier start.

    :param queue_file: the path of the store's YAML file
    """
    airflow = AirflowApi(os.environ["AIRFLOW_URL"], os.environ["AIRFLOW_ADMIN_PASSWORD"])
    wait_for(lambda: {ORDERS, PIPELINE} <= set(airflow.dags()), f"the DAGs {ORDERS} and {PIPELINE}")
    if ended_run(airflow, PIPELINE):
        print("The examples ran at an earlier start.")
        return 0
    if airflow.first_run(PIPELINE) is None:
        asyncio.run(make_dead_letters(WorkQueue.load(queue_file)))
    for dag_id in (ORDERS, PIPELINE):
        airflow.unpause(dag_id)
    if airflow.first_run(ORDERS) is None:
        airflow.trigger(ORDERS)
    # The schedule of the other DAG starts its run.
    runs = [wait_for(partial(ended_run, airflow, dag_id), f"the end of {dag_id}") for dag_id in (ORDERS, PIPELINE)]
    for run in runs:
        print(f"{run['dag_id']}: {run['state']}", flush=True)
    succeeded = all(run["state"] == "success" for run in runs)
    if succeeded:
        print_counts(airflow, *runs)
    # Only now: the DAG dead_letter_reprocess takes the same letters as dead_letter_pipeline.
    for dag_id in airflow.dags():
        airflow.unpause(dag_id)
    return 0 if succeeded else 1


async def make_dead_letters(queue: WorkQueue) -> None:
    """Publish orders that fail, each kind for its own reason, and wait until all are dead letters."""
    orders: list[dict[str, object]] = [
        *({"id": number, "amount": f"{number},50", "bank": "quick"} for number in range(MALFORMED)),
        *({"id": MALFORMED + number, "amount": number, "bank": "slow"} for number in range(BUSY)),
    ]
    bodies = [*(json.dumps(order) for order in orders), *["no order"] * POISON]
    jobs = [Job(body, id=f"first-run-{number}") for number, body in enumerate(bodies)]
    async with connect(ConnectionSettings.from_environment(os.environ)) as connection:
        await publish(connection, queue, jobs, subject="store.orders.new")
        print(f"{len(jobs)} orders of a store that can't be processed, and a worker that tries", flush=True)
        deadline = time.monotonic() + PATIENCE
        while len((await find_dead_letters(connection, queue)).letters) < len(jobs):
            if time.monotonic() > deadline:
                raise FirstRunError(f"expected {len(jobs)} dead letters within {PATIENCE:g} s: look at worker-store")
            await asyncio.sleep(1)


def ended_run(airflow: AirflowApi, dag_id: str) -> dict[str, Any] | None:
    """Return the first run of a DAG once it has ended."""
    run = airflow.first_run(dag_id)
    return run if run and run["state"] in ("success", "failed") else None


def wait_for(check: Callable[[], Found | None], what: str) -> Found:
    """Return what the check finds."""
    deadline = time.monotonic() + PATIENCE
    while not (found := check()):
        if time.monotonic() > deadline:
            raise FirstRunError(f"expected {what} within {PATIENCE:g} s, found none: look at the logs of Airflow")
        time.sleep(1)
    return found


def print_counts(airflow: AirflowApi, orders: dict[str, Any], pipeline: dict[str, Any]) -> None:
    """Print what happened to the jobs."""
    published, redriven = (airflow.result(orders, task_id) for task_id in ("publish", "redrive"))
    print(
        f"{ORDERS}: {published['published']} published, {published['completed']} completed, {published['dead']} dead,"
        f" {redriven['redriven']} redriven, {redriven['completed']} completed after that"
    )
    report, redriven = (airflow.result(pipeline, task_id) for task_id in ("report", "redrive"))
    print(
        f"{PIPELINE}: {report['letters']} dead letters of {report['causes']} causes, {redriven['redriven']} redriven,"
        f" {redriven['completed']} completed after that"
    )
    print(f"The report on them: docker compose cp airflow-scheduler:{report['page']} report.html")


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except (FirstRunError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
