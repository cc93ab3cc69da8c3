"""The notifier publishes from the callbacks of a task that fails: as a job where a stream captures its subject."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import provisioned, wait_for_states
from dags.notifying import NOTICES, PARCELS

from airflow_provider_jetstream.jetstream import Origin, connect
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.notifications.jetstream import JetStreamNotifier
from testbed import seams
from testbed.dead_letters import make_terminated_letters, stream_messages
from testbed.queues import stored_count, until_stored

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.airflow import Airflow


async def test_a_task_that_fails_publishes_what_happened(airflow: Airflow, settings: ConnectionSettings) -> None:
    await provisioned(settings, NOTICES)
    await provisioned(settings, PARCELS)
    async with connect(settings) as connection:
        await make_terminated_letters(connection, PARCELS, ["to Rome", "to Oslo"], reason="the road is shut")
        heard = await connection.client.subscribe("heard.by.nobody")
        await asyncio.to_thread(airflow.wait_for_dags, "notifying")
        run_id = await asyncio.to_thread(airflow.trigger, "notifying")
        await asyncio.to_thread(wait_for_states, airflow, "notifying", run_id, {"fail": "failed"})
        await until_stored(connection, "notices", 2, within=60)
        retry, failure = await stream_messages(connection, "notices")
        plain = await heard.next_msg(timeout=60)
    assert (retry.subject, failure.subject) == ("notices.retry", "notices.notifying")
    body = json.loads(failure.data)
    task = {"dag_id": "notifying", "run_id": run_id, "task_id": "fail", "map_index": -1}
    assert {name: body[name] for name in task} == task
    assert (body["message"], body["exception"]) == ("fail failed", "ValueError: the ledger is locked")
    # People read what broke and what to do, with what speaks for it.
    text, (group,) = body["diagnosis"]["text"], body["diagnosis"]["groups"]
    assert text.startswith("parcels: 2 dead letters, one cause: the road is shut, 100%, began ")
    assert group["advice"] in text
    assert group["evidence"]
    assert all(evidence in text for evidence in group["evidence"])
    assert json.loads(retry.data)["message"] == "tries again"
    # It is a job like any other, with an id and its task.
    headers = dict(failure.headers)
    assert headers["Job-Id"].startswith("notification-")
    assert headers["Nats-Msg-Id"]
    assert json.loads(plain.data)["message"] == "plain"


async def test_a_callback_that_runs_twice_stores_its_message_once_and_the_triggerer_can_await_it(
    settings: ConnectionSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await provisioned(settings, NOTICES)

    class Hook:
        """Stands for the Airflow connection, which a test outside of Airflow has none of."""

        def __init__(self, conn_id: str) -> None:
            self.conn_id = conn_id

        async def awaited(self, operation: Any, *arguments: Any) -> Any:
            async with connect(settings) as connection:
                return await operation(connection, *arguments)

    monkeypatch.setattr(seams.JETSTREAM_JET_STREAM_HOOK, Hook)
    instance = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1, state="failed")
    async with connect(settings) as connection:
        before = await stored_count(connection, "notices")
        for context in ({"ti": instance}, {"ti": instance}, {}, {"dag_run": SimpleNamespace(dag_id="d", run_id="r")}):
            notifier = JetStreamNotifier(subject="notices.twice", context=context)
            await notifier
        assert await stored_count(connection, "notices") == before + 3
        for _ in range(2):
            await JetStreamNotifier(subject="notices.queue", queue=NOTICES, diagnose=NOTICES, context={"ti": instance})
        assert await stored_count(connection, "notices") == before + 4
        # What can't be diagnosed is said in the same place.
        gone = PARCELS.model_copy(update={"name": "parcels_gone"})
        await JetStreamNotifier(subject="notices.gone", queue=NOTICES, diagnose=gone, context={"ti": instance})
        (notice,) = await stream_messages(connection, "notices", "notices.gone")
        assert json.loads(notice.data)["diagnosis"]["text"].startswith("parcels_gone can't be diagnosed: expected ")
        # The record of what the task itself has published isn't replaced.
        key = Origin("d", "r", "t").key
        assert not await stream_messages(connection, "notices_events", f"published.notices.{key}")


def test_a_subject_that_nothing_can_be_published_to_is_refused_when_the_dag_is_parsed() -> None:
    for subject in ("notices.>", "", "a b", None):
        with pytest.raises(ArgumentError, match="expected a subject to publish a notification on"):
            JetStreamNotifier(subject=subject)  # type: ignore[arg-type]
