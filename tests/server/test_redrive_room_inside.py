"""What no face shows of redrive room."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from airflow_provider_jetstream.jetstream.queue.stream_config import stored_size
from airflow_provider_jetstream.jetstream.redrive.redriven_job import require_room_for_all
from testbed.dead_letters import change_stream
from testbed.face import Headers, Scan
from testbed.queues import (
    make_queue,
)

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


@pytest.mark.parametrize("storage", ["file", "memory"])
async def test_the_size_of_a_stored_message_is_known_before_it_is_stored(
    connection: NatsPyConnection, name: str, storage: str
) -> None:
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": storage})
    headers, body = Headers([("Some", "value"), ("Nats-Msg-Id", "1")]), b"x" * 100
    await store(connection, f"{name}.a", body, headers)
    size = (await connection.api(f"STREAM.INFO.{name}"))["state"]["bytes"]
    computed = stored_size(f"{name}.a", headers, body)
    assert size == computed if storage == "file" else size <= computed


async def test_a_bulk_redrive_is_refused_where_its_tasks_might_drop_jobs(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="old", max_msgs=20, jobs="abc")
    scan = await Scan.begin(connection, queue)
    require_room_for_all(scan.snapshot, 17, connection.max_payload)
    with pytest.raises(RedriveRequestError, match=r"copies of up to 18 letters.*max_msgs 20, 3 used, 18 needed"):
        require_room_for_all(scan.snapshot, 18, connection.max_payload)
    await change_stream(connection, f"{name}-dead", discard="old", max_msgs=5)
    scan = await Scan.begin(connection, queue)
    with pytest.raises(RedriveRequestError, match=f"max_msgs 5, 0 used, 6 needed.*{name}-dead would drop"):
        require_room_for_all(scan.snapshot, 6, connection.max_payload, f"{name}-dead")
    await change_stream(connection, name, max_msgs=-1, max_msgs_per_subject=1)
    scan = await Scan.begin(connection, queue)
    with pytest.raises(RedriveRequestError, match="expected a queue without max_msgs_per_subject"):
        require_room_for_all(scan.snapshot, 1, connection.max_payload)
