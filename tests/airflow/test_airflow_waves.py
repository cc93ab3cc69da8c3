"""Redrives in waves in a real Airflow: deferred while jobs and people are awaited, and steered meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from airflow_steps import log_text, provisioned, succeeded, wait_for_states
from dags.waves import PROOF, STEERED, queue

from airflow_provider_jetstream.jetstream import list_redrives, read_redrive
from testbed.dead_letters import letter_records
from testbed.face import summarise_dead_letters
from testbed.queues import eventually
from testbed.shop import shop_with_letters

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, Redrive
    from testbed.airflow import Airflow
    from testbed.face import NatsPyConnection

MANY = 5_000 if os.environ.get("FAULTS") == "full" else 300
WITHIN = 300.0
RUN = "in-waves"
TASK = "redrive"
DEFERRED = {TASK: "deferred"}


async def reached(connection: NatsPyConnection, name: str, state: str) -> Redrive:
    """Wait until the only redrive of a queue is recorded in a state."""

    async def found() -> Redrive | None:
        redrives = await list_redrives(connection, queue(name))
        return next((redrive for redrive in redrives if redrive.state == state and not redrive.pending), None)

    return await eventually(found, WITHIN)


def counts_of(redrive: Any) -> dict[str, Any]:
    """Return the counts that every view of a redrive has, from its JSON."""
    waves = [
        {name: wave[name] for name in ("number", "redriven", "parked", "outcomes", "died_of", "passed_by", "reason")}
        for wave in redrive["waves"]
    ]
    names = ("state", "reason", "redriven", "parked", "failed", "gone", "outcomes")
    return {name: redrive[name] for name in names} | {"waves": waves}


def on_page(airflow: Airflow, name: str, redrive: str) -> Any:
    """Return a redrive as the page's API answers it."""
    return airflow.api("GET", f"/jetstream/api/queues/nats_default/{name}/redrives/{redrive}")


def steered_on_page(airflow: Airflow, name: str, redrive: str, action: str, why: str) -> Any:
    """Steer a redrive as the page does."""
    path = f"/jetstream/api/queues/nats_default/{name}/redrives/{redrive}/{action}"
    return airflow.api("POST", path, {"why": why})


def command(settings: ConnectionSettings, *arguments: str) -> Any:
    """Return what ``jetstream-queue redrive`` prints as JSON."""
    assert settings.password is not None
    own = {
        "NATS_URL": settings.servers[0],
        "NATS_USER": str(settings.user),
        "NATS_PASSWORD": settings.password.get_secret_value(),
    }
    words = [sys.executable, "-m", "airflow_provider_jetstream.command.program", "redrive", *arguments, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=os.environ | own)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def everywhere(
    airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection, name: str, redrive: str
) -> dict[str, Any]:
    """Return the counts of a redrive, which page, command line and audit have to agree on."""
    page = counts_of(await asyncio.to_thread(on_page, airflow, name, redrive))
    line = counts_of(await asyncio.to_thread(command, settings, "status", name, redrive))
    audit = counts_of((await read_redrive(connection, queue(name), redrive)).model_dump(mode="json"))
    assert page == line == audit
    return audit


async def canary_and_waves(airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection) -> None:
    """The canary stops; once the handler is mended and a person has resumed, all waves complete."""
    declared = await provisioned(settings, queue(PROOF))
    async with shop_with_letters(connection, settings, declared, MANY, WITHIN) as shop:
        shop.fails = lambda number: "no currency" if number % 10 < 6 else ""
        await asyncio.to_thread(airflow.wait_for_dags, PROOF)
        airflow.trigger(PROOF, run_id=RUN)
        stopped = await reached(connection, PROOF, "at_gate")
        at_gate = await everywhere(airflow, settings, connection, PROOF, stopped.id)
        outcomes = {"completed": 4, "died_again": 6, "still_running": 0, "unknown": 0}
        assert (at_gate["redriven"], at_gate["outcomes"], len(at_gate["waves"])) == (10, outcomes, 1)
        assert at_gate["reason"].startswith("of 10 jobs of wave 1, 4 completed and 6 died again (6 of ValueError: no c")
        assert at_gate["reason"].endswith(": more than 20%")
        assert (stopped.why, stopped.who["dag_id"], stopped.letters) == ("ticket 4711", PROOF, MANY)
        # It waits for a person without a worker slot.
        await asyncio.to_thread(wait_for_states, airflow, PROOF, RUN, DEFERRED)
        assert sum(shop.done.values()) == 4
        shop.fails = lambda _: ""
        await asyncio.to_thread(steered_on_page, airflow, PROOF, stopped.id, "resume", "mended")
        await asyncio.to_thread(succeeded, airflow, PROOF, RUN, 2 * WITHIN)
        finished = await everywhere(airflow, settings, connection, PROOF, stopped.id)
        xcom = await asyncio.to_thread(airflow.xcom, PROOF, RUN, TASK)
        assert counts_of(xcom) == finished
        assert (xcom["redrive"], xcom["resumed"], xcom["redriven"]) == (stopped.id, 0, finished["redriven"])
        assert finished["outcomes"] == {"completed": MANY, "died_again": 0, "still_running": 0, "unknown": 0}
        assert (finished["state"], finished["parked"], finished["failed"]) == ("finished", 0, 0)
        # Each of the six that died again became a job once more, which counts.
        assert finished["redriven"] == MANY + 6
        assert [(wave["redriven"], wave["outcomes"]["completed"]) for wave in finished["waves"]] == [
            (10, 4),
            (100, 100),
            (MANY - 104, MANY - 104),
        ]
        assert [wave["passed_by"] for wave in finished["waves"]] == ["admin", "rule", "rule"]
        assert Counter(shop.done.values()) == {1: MANY}
    assert (await summarise_dead_letters(connection, declared)).dead == 0
    records = await letter_records(connection, declared)
    assert Counter(record.wave for record in records) == {1: 10, 2: 100, 3: MANY - 104}
    assert [found.id for found in await list_redrives(connection, declared)] == [stopped.id]


async def pauses_and_aborts(airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection) -> None:
    """Deferred tasks obey before the jobs of their waves have ended."""
    async with AsyncExitStack() as stack:
        shops = []
        for name in STEERED:
            declared = await provisioned(settings, queue(name))
            shops.append(await stack.enter_async_context(shop_with_letters(connection, settings, declared, 20, WITHIN)))
        await asyncio.to_thread(airflow.wait_for_dags, *STEERED)
        for shop, name in zip(shops, STEERED, strict=True):
            shop.fails = lambda _: ""
            shop.is_open.clear()
            airflow.trigger(name, run_id=RUN)
        paused, aborted = [await reached(connection, name, "running") for name in STEERED]
        for name in STEERED:
            await asyncio.to_thread(wait_for_states, airflow, name, RUN, DEFERRED)
        page, line = STEERED
        # None of the waves' jobs ends before both have been obeyed.
        await asyncio.to_thread(steered_on_page, airflow, page, paused.id, "pause", "a deployment")
        await asyncio.to_thread(command, settings, "abort", line, aborted.id, "--why", "enough")
        ended = await reached(connection, line, "aborted")
        assert (ended.redriven, ended.outcomes.still_running, ended.reason.partition(": ")[2]) == (5, 5, "enough")
        found = await reached(connection, page, "paused")
        assert (found.redriven, found.reason) == (5, "pause by admin: a deployment")
        await asyncio.to_thread(wait_for_states, airflow, line, RUN, {TASK: "failed"})
        assert f"the redrive {aborted.id} was aborted" in log_text(airflow, line, RUN, TASK)
        await asyncio.to_thread(wait_for_states, airflow, page, RUN, DEFERRED)
        await asyncio.to_thread(command, settings, "resume", page, paused.id)
        running = await reached(connection, page, "running")
        assert (running.redriven, running.outcomes.still_running) == (5, 5)
        for shop in shops:
            shop.is_open.set()
        await asyncio.to_thread(succeeded, airflow, page, RUN, WITHIN)
        xcom = await asyncio.to_thread(airflow.xcom, page, RUN, TASK)
        assert counts_of(xcom) == await everywhere(airflow, settings, connection, page, paused.id)
        assert xcom["outcomes"] == {"completed": 20, "died_again": 0, "still_running": 0, "unknown": 0}
        assert (xcom["redriven"], xcom["resumed"], Counter(shops[0].done.values())) == (20, 0, {1: 20})
        # What was aborted leaves the others where they are.
        assert (await summarise_dead_letters(connection, queue(line))).dead == 15


async def test_waves_are_deferred_steered_and_counted_exactly_everywhere(
    airflow: Airflow, settings: ConnectionSettings, connection: NatsPyConnection
) -> None:
    # At the same time: most of it is Airflow's own time to defer and resume a task.
    async with asyncio.TaskGroup() as group:
        group.create_task(canary_and_waves(airflow, settings, connection))
        group.create_task(pauses_and_aborts(airflow, settings, connection))
