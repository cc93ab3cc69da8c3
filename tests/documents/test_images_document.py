"""The image pipeline: images are converted; a poison job uses up five deliveries and is read by its sequence.

The ack wait is shorter than the document's 30 s; the number of deliveries is the document's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from PIL import Image

from airflow_provider_jetstream.jetstream.advisories import MaxDeliveries, parse_advisory
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.dead_letters.find import find_dead_letters
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from testbed.queues import eventually, stored_count
from testbed.workers import start_worker

if TYPE_CHECKING:
    from pathlib import Path

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from testbed.nats_server import NatsServer

STREAM: dict[str, Any] = {
    "name": "IMAGES",
    "subjects": ["IMAGES.>"],
    "retention": "workqueue",
    "storage": "file",
    "discard": "old",
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msg_size": 512,
    "duplicate_window": 3_600_000_000_000,
    "num_replicas": 1,
}
CONSUMER: dict[str, Any] = {
    "durable_name": "BW",
    "ack_policy": "explicit",
    "deliver_policy": "all",
    "replay_policy": "instant",
    "max_deliver": 5,
    "ack_wait": 1_000_000_000,
    "filter_subject": "IMAGES.blackandwhite",
}
QUEUE = """
name: IMAGES
subjects: ["IMAGES.>"]
discard: old
max_msg_size: 512B
duplicate_window: 1h
archive: false
audit: false
consumers:
  - {name: BW, filter_subject: IMAGES.blackandwhite, max_deliver: 5, ack_wait: 1s}
dead_letters: IMAGES_DLQ
"""


async def test_images_become_black_and_white_and_the_poison_job_is_read_by_its_sequence(
    nats: NatsServer, connection: NatsPyConnection, tmp_path: Path
) -> None:
    # The document creates streams and consumers by hand.
    await connection.api("STREAM.CREATE.IMAGES", STREAM)
    body = {"stream_name": "IMAGES", "config": CONSUMER}
    await connection.api("CONSUMER.CREATE.IMAGES.BW.IMAGES.blackandwhite", body | {"action": "create"})
    letters = {"name": "IMAGES_DLQ", "subjects": ["$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.IMAGES.*"]}
    await connection.api("STREAM.CREATE.IMAGES_DLQ", letters)
    (tmp_path / "images.yaml").write_text(QUEUE)
    (tmp_path / "output").mkdir()
    job_advisories: list[tuple[str, str]] = []

    async def on_job_advisory(message: Msg) -> None:
        job_advisories.append((message.subject, json.loads(message.data)["id"]))

    await connection.client.subscribe("advisory.>", cb=on_job_advisory)
    server_advisories: list[MaxDeliveries] = []

    async def on_server_advisory(message: Msg) -> None:
        advisory = parse_advisory(message.data)
        assert isinstance(advisory, MaxDeliveries)
        server_advisories.append(advisory)

    subject = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.IMAGES.BW"
    await connection.client.subscribe(subject, cb=on_server_advisory)
    requests = [conversion_request(tmp_path, number) for number in range(8)]
    for request in requests:
        await publish(connection, json.dumps(request).encode())
    poison = await publish(connection, b"{}")
    worker = start_worker(
        "bw",
        queue=tmp_path / "images.yaml",
        consumer="BW",
        handler="example_workers.images:convert",
        env=os.environ
        | {
            "NATS_URL": nats.url,
            "OUTDIR": str(tmp_path / "output"),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        logs=tmp_path,
        concurrency=2,
    )
    try:
        await eventually(lambda: server_advisories, within=60)
    finally:
        worker.terminate()
    for request in requests:
        with Image.open(tmp_path / "output" / f"{request['id']}.png") as converted:
            assert (converted.mode, converted.size) == ("1", (64, 48))
    assert sorted(job_advisories) == sorted((request["advisory"], request["id"]) for request in requests)
    assert [(advisory.stream_seq, advisory.deliveries) for advisory in server_advisories] == [(poison, 5)]
    message = await get_message(connection, "IMAGES", poison)
    assert message is not None
    assert (message.subject, message.data) == ("IMAGES.blackandwhite", b"{}")
    assert await stored_count(connection, "IMAGES") == 1
    (letter,) = (await find_dead_letters(connection, WorkQueue.load(tmp_path / "images.yaml"))).letters
    assert (letter.sequence, letter.death.deliveries) == (poison, 5)


def conversion_request(folder: Path, number: int) -> dict[str, str]:
    """Draw an image in colour, and return the request to convert it."""
    image = Image.new("RGB", (64, 48), (number * 30, 255 - number * 30, 128))
    path = folder / f"colour {number}.png"
    image.save(path)
    return {"id": f"5e91425f{number}", "image": path.as_uri(), "advisory": f"advisory.5e91425f{number}"}


async def publish(connection: NatsPyConnection, body: bytes) -> int:
    ack = await asyncio.wait_for(connection.client.request("IMAGES.blackandwhite", body), 5)
    return int(json.loads(ack.data)["seq"])
