"""The image pipeline: core NATS workers that crash on a poison job, advisories of their own, messages of 512 bytes.

The ack wait is shorter than the document's 30 s; the number of deliveries is the document's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from document_configurations import IMAGES
from PIL import Image

from airflow_provider_jetstream.dev.worker_processes import start_worker
from airflow_provider_jetstream.jetstream import (
    Origin,
    RedriveRequest,
    Selection,
    WaitPolicy,
    WorkQueue,
    find_dead_letters,
    get_message,
    provision,
    publish,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from testbed.face import consumer_info
from testbed.foreign_programs import start_program
from testbed.ledger import read_ledger
from testbed.queues import until_stored

if TYPE_CHECKING:
    from pathlib import Path

    from nats.aio.msg import Msg

    from airflow_provider_jetstream.dev.process import Process
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SUBJECT = "IMAGES.blackandwhite"
MAX_BYTES = 512
POISON = b"{}"
# As long as names of DAGs, runs and tasks are in practice.
ORIGIN = Origin("d" * 60, "r" * 60, "t" * 60, 4)


def images_queue(sample_freq: str | None = None, **fields: Any) -> WorkQueue:
    declared = yaml.safe_load(IMAGES.path.read_text())
    declared["consumers"][0] |= {"ack_wait": "1s"} | ({"sample_freq": sample_freq} if sample_freq else {})
    return WorkQueue(**declared | fields)


async def created_by_hand(connection: NatsPyConnection, queue: WorkQueue) -> WorkQueue:
    """Create stream and consumer as the document does, then let provisioning add the rest."""
    await IMAGES.create(connection)
    await provision(connection, queue)
    return queue


def converter(program_env: dict[str, str], folder: Path, name: str = "bw") -> Process:
    """Start the document's worker, and again whenever it crashes."""
    (folder / "output").mkdir(exist_ok=True)
    env = program_env | {"OUTDIR": str(folder / "output")}
    return start_program(name, "foreign_images", env=env, logs=folder, restarted=True)


def conversion_request(folder: Path, number: int) -> dict[str, str]:
    """Return the request to convert an image, of the document's form and length."""
    job_id = f"5e91425fc89dac47f6d2e95d4cf6b7{number:02}"
    image = (folder / f"{number:02}.png").as_uri()
    return {"id": job_id, "image": image, "advisory": f"advisory.{job_id}"}


def draw(folder: Path, number: int) -> None:
    Image.new("RGB", (64, 48), (number * 30, 255 - number * 30, 128)).save(folder / f"{number:02}.png")


async def stored_size(connection: NatsPyConnection, sequence: int) -> int:
    """Count the bytes that the server compares with ``max_msg_size``: headers and body."""
    message = (await connection.api("STREAM.MSG.GET.IMAGES", {"seq": sequence}))["message"]
    return sum(len(base64.b64decode(message.get(part, ""))) for part in ("hdrs", "data"))


async def server_advisories(connection: NatsPyConnection) -> list[tuple[int, int]]:
    """Collect sequence and deliveries of what the server publishes when deliveries are used up."""
    advised: list[tuple[int, int]] = []

    async def on_advisory(message: Msg) -> None:
        advisory = json.loads(message.data)
        advised.append((advisory["stream_seq"], advisory["deliveries"]))

    await connection.client.subscribe("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.IMAGES.BW", cb=on_advisory)
    return advised


@pytest.mark.slow
async def test_a_request_from_a_dag_with_long_names_is_converted_or_dies_and_is_redriven_within_512_bytes(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str], ledger: Path
) -> None:
    queue = await created_by_hand(connection, images_queue())
    requests = [conversion_request(tmp_path, number) for number in range(4)]
    for number in range(3):
        draw(tmp_path, number)
    cursor = await take_cursor(connection, queue)
    jobs: list[Any] = [*requests, POISON]
    report = await publish(connection, queue, jobs, subject=SUBJECT, origin=ORIGIN)
    *converted, late, poison = report.sequences
    for sequence in report.sequences:
        assert await stored_size(connection, sequence) <= MAX_BYTES
    advised = await server_advisories(connection)
    process = converter(program_env, tmp_path)
    try:
        async with asyncio.timeout(60):
            ends = await wait(connection, cursor, report.sequences, policy=WaitPolicy(max_dead=2))
        assert (ends.completed, set(ends.dead), ends.unaccounted) == (set(converted), {late, poison}, set())

        assert sorted(advised) == [(late, 5), (poison, 5)]
        letters = {letter.sequence: letter for letter in (await find_dead_letters(connection, queue)).letters}
        assert {letter.death.deliveries for letter in letters.values()} == {5}
        message = await get_message(connection, "IMAGES", poison)
        assert message is not None
        assert (message.subject, message.data) == (SUBJECT, POISON)
        assert {letter.origin for letter in letters.values()} == {ORIGIN}
    finally:
        process.terminate()

    draw(tmp_path, 3)
    cursor = await take_cursor(connection, queue)
    request = RedriveRequest(selection=Selection(sequences=frozenset({late})))
    redrive = await redrive_dead_letters(connection, queue, request)
    redrive.raise_for_failures()
    (copy,) = redriven = redrive.awaited_sequences()
    assert await stored_size(connection, copy) <= MAX_BYTES
    process = converter(program_env, tmp_path)
    try:
        async with asyncio.timeout(30):
            assert (await wait(connection, cursor, redriven)).completed == redriven
    finally:
        process.terminate()
    assert sorted(line["converted"] for line in read_ledger(ledger)) == [request["id"] for request in requests]


@pytest.mark.slow
async def test_without_sampling_the_advisory_that_a_request_names_is_its_end(
    connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str]
) -> None:
    # Declared, because a server may go on sampling until it is restarted.
    queue = await created_by_hand(connection, images_queue(sample_freq="0"))
    assert (await consumer_info(connection, "IMAGES", "BW"))["config"].get("sample_freq", "0") == "0"
    draw(tmp_path, 0)
    cursor = await take_cursor(connection, queue)
    report = await publish(connection, queue, [conversion_request(tmp_path, 0)], subject=SUBJECT, origin=ORIGIN)
    process = converter(program_env, tmp_path)
    try:
        async with asyncio.timeout(20):
            ends = await wait(connection, cursor, report.sequences, advised=report.advised)
        assert ends.completed == set(report.sequences)
    finally:
        process.terminate()


@pytest.mark.slow
async def test_this_packages_worker_does_the_same_beside_the_documents(
    nats: NatsServer, connection: NatsPyConnection, tmp_path: Path, program_env: dict[str, str], ledger: Path
) -> None:
    queue = await created_by_hand(connection, images_queue())
    (tmp_path / "images.yaml").write_text(yaml.safe_dump(queue.model_dump(mode="json", exclude_unset=True)))
    advised: list[tuple[str, str]] = []

    async def on_advisory(message: Msg) -> None:
        advised.append((message.subject, json.loads(message.data)["id"]))

    await connection.client.subscribe("advisory.>", cb=on_advisory)
    requests = [conversion_request(tmp_path, number) for number in range(8)]
    for number in range(8):
        draw(tmp_path, number)
    for request in requests:
        await connection.client.jetstream().publish(SUBJECT, json.dumps(request).encode())
    own = start_worker(
        "own",
        queue=tmp_path / "images.yaml",
        consumer="BW",
        handler="example_workers.images:convert",
        env=program_environment(program_env, tmp_path),
        logs=tmp_path,
    )
    process = converter(program_env, tmp_path)
    try:
        await until_stored(connection, "IMAGES", 0, within=30)
    finally:
        own.terminate()
        process.terminate()
    for request in requests:
        with Image.open(tmp_path / "output" / f"{request['id']}.png") as image:
            assert (image.mode, image.size) == ("1", (64, 48))
    assert sorted(advised) == sorted((request["advisory"], request["id"]) for request in requests)


def program_environment(program_env: dict[str, str], folder: Path) -> dict[str, str]:
    (folder / "output").mkdir(exist_ok=True)
    python_path = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, **program_env, "OUTDIR": str(folder / "output"), "PYTHONPATH": python_path}
