"""What no face shows of a redrive's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import RedriveReport, RedriveRequest, connect, connection_settings
from airflow_provider_jetstream.jetstream.audit.intent import IntentLog
from airflow_provider_jetstream.jetstream.redrive.operation import Operation
from airflow_provider_jetstream.jetstream.redrive.redrive import RedriveStep, rule_of
from testbed.face import Scan
from testbed.queues import eventually, make_dead_letters, make_queue, stored_count, until_stored

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer


@pytest.mark.slow
async def test_a_step_that_has_scanned_again_removes_no_entry_that_has_the_sequence_of_one_that_is_lost(
    own_nats: NatsServer, name: str
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name, archive=True)
        await make_dead_letters(connection, queue, ["first"])
        await until_stored(connection, f"{name}-dead", 1)
        operation = Operation(connection, queue, RedriveRequest(), RedriveReport())
        scan = await Scan.begin(connection, queue)
        assert scan.audit is not None
        step = RedriveStep(operation, rule_of(operation), scan, IntentLog(connection, scan.audit, "op"))
        await step.prepare()
        own_nats.keep(f"{name}-dead")
        await make_dead_letters(connection, queue, ["second"])
        await until_stored(connection, f"{name}-dead", 2)
        step.scan = await Scan.begin(connection, queue)
        own_nats.lose_power(f"{name}-dead")
        await eventually(lambda: connection.reconnects > 0)
        await make_dead_letters(connection, queue, ["third"])
        await until_stored(connection, f"{name}-dead", 2)
        await step.steps.add_entries([2])
        await step.steps.remove_entries()
        assert await stored_count(connection, f"{name}-dead") == 2
        assert operation.report.entries_left == 1
