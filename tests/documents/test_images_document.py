"""The image pipeline: real images, a poison job with five attempts, its advisory seen, the message read by sequence.

The ack wait is shorter than the document's 30 s; the number of attempts isn't.
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

    from airflow_provider_jetstream.jetstream.client.connection import Connection
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
    nats: NatsServer, connection: Connection, tmp_path: Path
) -> None:
    # As the document has it: made by hand, beforehand.
    await connection.api("STREAM.CREATE.IMAGES", STREAM)
    body = {"stream_name": "IMAGES", "config": CONSUMER}
    await connection.api("CONSUMER.CREATE.IMAGES.BW.IMAGES.blackandwhite", body | {"action": "create"})
    letters = {"name": "IMAGES_DLQ", "subjects": ["$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.IMAGES.*"]}
    await connection.api("STREAM.CREATE.IMAGES_DLQ", letters)
    (tmp_path / "images.yaml").write_text(QUEUE)
    (tmp_path / "output").mkdir()
    advised: list[tuple[str, str]] = []

    async def advise(message: Msg) -> None:
        advised.append((message.subject, json.loads(message.data)["id"]))

    await connection.client.subscribe("advisory.>", cb=advise)
    told: list[MaxDeliveries] = []

    async def tell(message: Msg) -> None:
        advisory = parse_advisory(message.data)
        assert isinstance(advisory, MaxDeliveries)
        told.append(advisory)

    await connection.client.subscribe("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.IMAGES.BW", cb=tell)
    requests = [request(tmp_path, number) for number in range(8)]
    for each in requests:
        await publish(connection, json.dumps(each).encode())
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
        await eventually(lambda: told, within=60)
    finally:
        worker.terminate()
    for each in requests:
        with Image.open(tmp_path / "output" / f"{each['id']}.png") as converted:
            assert (converted.mode, converted.size) == ("1", (64, 48))
    assert sorted(advised) == sorted((each["advisory"], each["id"]) for each in requests)
    assert [(each.stream_seq, each.deliveries) for each in told] == [(poison, 5)]
    message = await get_message(connection, "IMAGES", poison)
    assert message is not None
    assert (message.subject, message.data) == ("IMAGES.blackandwhite", b"{}")
    assert await stored_count(connection, "IMAGES") == 1
    (letter,) = (await find_dead_letters(connection, WorkQueue.load(tmp_path / "images.yaml"))).letters
    assert (letter.sequence, letter.death.deliveries) == (poison, 5)


def request(folder: Path, number: int) -> dict[str, str]:
    """Draw an image in colours, and give the request to convert it."""
    image = Image.new("RGB", (64, 48), (number * 30, 255 - number * 30, 128))
    path = folder / f"colour {number}.png"
    image.save(path)
    return {"id": f"5e91425f{number}", "image": path.as_uri(), "advisory": f"advisory.5e91425f{number}"}


async def publish(connection: Connection, body: bytes) -> int:
    ack = await asyncio.wait_for(connection.client.request("IMAGES.blackandwhite", body), 5)
    return int(json.loads(ack.data)["seq"])
