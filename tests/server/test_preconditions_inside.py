"""What no face shows of the preconditions."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    find_dead_letters,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import RedriveError, RedriveRequestError
from airflow_provider_jetstream.jetstream.queue.finding import Refusal, Restriction, Risk
from airflow_provider_jetstream.jetstream.queue.preconditions import queue_findings
from airflow_provider_jetstream.jetstream.queue.snapshot import take_snapshot
from airflow_provider_jetstream.jetstream.redrive.in_place import Requeue, requeue
from airflow_provider_jetstream.jetstream.redrive.protocol import choose_protocol
from testbed.face import Scan
from testbed.queues import (
    CONSUMER,
    eventually,
    make_queue,
    publish_jobs,
    pull_jobs,
    small_queue,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection


async def test_findings_have_stable_names_and_travel_to_other_processes(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="old", max_msgs=5, archive=None)
    findings = queue_findings(
        await take_snapshot(connection, queue), queue, unreadable=2, other_domain={"elsewhere": 3}
    )
    copied = pickle.loads(pickle.dumps(findings))  # noqa: S301
    assert [(type(finding), finding.name, finding) for finding in copied] == [
        (type(finding), finding.name, finding) for finding in findings
    ]
    names = {finding.name: type(finding) for finding in findings}
    assert (
        names.items()
        >= {
            "evicts-jobs": Restriction,
            "no-archive": Risk,
            "unreadable-entries": Risk,
            "other-domain": Restriction,
        }.items()
    )
    assert Refusal not in names.values()


@pytest.mark.slow
async def test_done_jobs_that_a_sourcing_stream_holds_are_uncertain_and_not_dead(
    connection: NatsPyConnection, name: str
) -> None:
    if connection.api_level < 4:
        pytest.skip("a sourcing stream holds jobs since nats-server 2.14")
    queue = await make_queue(connection, name, consumer={"max_deliver": 2, "ack_wait": "30s"})
    # Full after its first message, it acknowledges no other.
    copying = {"name": f"{name}-copy", "sources": [{"name": name}], "max_msgs": 1, "discard": "new"}
    await connection.api(f"STREAM.CREATE.{name}-copy", copying)
    await publish_jobs(connection, queue, "abcdef")

    async def is_held() -> bool:
        listed = (await connection.api(f"CONSUMER.LIST.{name}"))["consumers"]
        return any(info["config"].get("sourcing") and info["num_ack_pending"] for info in listed)

    await eventually(is_held)
    for message in await pull_jobs(connection, queue, 6):
        await message.ack_sync()
    assert await stored_count(connection, name) == 6
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.uncertain) == ((), 6)
    assert any(risk.name == "sourced-queue" for risk in findings.risks)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), report.uncertain) == ({}, 6)
    with pytest.raises(RedriveRequestError, match="a redrive in place would run them again"):
        await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    consumer = (await take_snapshot(connection, queue)).consumers[CONSUMER]

    async def record_first() -> Requeue:
        return Requeue(1, consumer.filters)

    with pytest.raises(RedriveError, match="jobs that are done stay stored until it has; run it again"):
        await requeue(connection, name, consumer, record_first)
    await connection.api(f"STREAM.UPDATE.{name}-copy", copying | {"max_msgs": -1})
    await until_stored(connection, name, 0, within=20)
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.uncertain) == ((), 0)


async def test_a_queue_that_only_mirrors_or_sources_gets_its_letters_back_in_place(
    connection: NatsPyConnection, name: str
) -> None:
    queue = small_queue(name)
    snapshot_of = await make_queue(connection, f"{name}-other")
    scan = await Scan.begin(connection, snapshot_of)
    config = {"name": name, "retention": "workqueue", "sources": [{"name": "elsewhere"}]}
    snapshot = type(scan.snapshot)(
        queue=name,
        created=scan.snapshot.created,
        config=config,
        state=scan.snapshot.state,
        consumers={},
        taken_at=scan.snapshot.taken_at,
    )
    assert choose_protocol(RedriveRequest(), snapshot, 5).protocol == Protocol.IN_PLACE
    with pytest.raises(RedriveRequestError, match="takes its jobs from other streams only"):
        choose_protocol(RedriveRequest(protocol=Protocol.COPY), snapshot, 5)
    assert "no-copies" in {finding.name for finding in queue_findings(snapshot, queue)}
