"""What the provisioning task logs of best practices: those of the declaration, and what the queue itself shows."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any, cast

import pytest

from airflow_provider_jetstream.jetstream import QueueWarning, provision
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from testbed.queues import small_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

pytestmark = pytest.mark.usefixtures("own_connections")


async def test_the_task_logs_each_warning_with_its_name_and_its_place_in_the_documentation(
    connection: NatsPyConnection, name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    consumer = {"backoff": ["30s"], "ack_wait": None, "max_deliver": 3, "sample_freq": "100%"}
    queue = small_queue(name, consumer=consumer, duplicate_window="1h")
    await provision(connection, queue)
    for sequence in range(1, 30):
        metric: dict[str, Any] = {"stream": name, "consumer": "worker", "stream_seq": sequence, "deliveries": 1}
        metric |= {"type": "io.nats.jetstream.metric.v1.consumer_ack", "timestamp": "2026-01-01T00:00:00Z"}
        body = json.dumps(metric | {"ack_time": 29_000_000_000}).encode()
        await connection.client.jetstream().publish(f"$JS.EVENT.METRIC.CONSUMER.ACK.{name}.worker", body)
    operator = JetStreamProvisionOperator(task_id="provision", work_queue=queue)
    caplog.set_level(logging.WARNING)
    done = await asyncio.to_thread(operator.execute, cast("Any", {}))
    assert f"keep stream {name}" in done
    log = caplog.text + capsys.readouterr().out
    # The declaration and the queue itself both show it.
    assert log.count("[unbounded-archive, ") == 1
    for rule in ("duplicate-window", "short-ack-wait"):
        assert f"[{rule}, see {QueueWarning(rule, rule).rule}]" in log
