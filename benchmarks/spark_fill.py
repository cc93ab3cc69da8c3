"""A queue with hundreds of thousands of dead jobs, made over bare connections, since nats-py would take minutes."""

import json
import time
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from typing import Any

from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import copy_subject, late_ack_subject
from airflow_provider_jetstream.jetstream.provisioning.apply import provision
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

BODY = b"x" * 1024
KINDS = 100

_BURST = 500


class DeadQueue:
    """Makes a queue whose jobs are all dead letters; further keyword arguments are fields of the queue.

    With ``with_records`` every other job has a worker's record of its error, of a hundred kinds.
    """

    def __init__(self, url: str, name: str, letters: int, *, with_records: bool = True, **queue_fields: Any) -> None:
        self.url = url
        self.letters = letters
        self.with_records = with_records
        fields: dict[str, Any] = {
            "name": name,
            "subjects": [f"{name}.jobs.*"],
            "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "1s", "max_ack_pending": -1}],
            "dead_letters": f"{name}-dead",
            "archive": False,
            **queue_fields,
        }
        self.queue = WorkQueue(**fields)

    async def run(self) -> WorkQueue:
        """Make the queue."""
        settings = connection_settings({"servers": (self.url,), "timeout": 30})
        async with connect(settings) as connection:
            await provision(connection, self.queue)
            with closing(NatsSocket(socket_settings({"servers": self.url, "timeout": "60"}))) as socket:
                self._publish(socket)
                self._deliver(socket)
            count = self.letters + (self.letters // 2 if self.with_records else 0)
            while (await stream_info(connection, f"{self.queue.name}-dead"))["state"]["messages"] < count:
                await probe_consumer(connection, self.queue.name, "worker")
        return self.queue

    def _publish(self, socket: NatsSocket) -> None:
        name = self.queue.name
        jobs = (
            b"PUB %b.jobs.%d %d\r\n%b\r\n" % (name.encode(), sequence % 7, len(BODY), BODY) for sequence in self._all()
        )
        self._send(socket, jobs, name)

    def _deliver(self, socket: NatsSocket) -> None:
        name, stream = self.queue.name, SourceStream(socket, self.queue.name)
        while pending := stream.api(f"CONSUMER.INFO.{name}.worker")["num_pending"]:
            pull = json.dumps({"batch": min(pending, _BURST), "no_wait": True}).encode()
            topic = f"$JS.API.CONSUMER.MSG.NEXT.{name}.worker {socket.new_reply_subject()}"
            # The jobs arrive before the answer to the next request, which discards them.
            socket.send(b"PUB %b %d\r\n%b\r\n" % (topic.encode(), len(pull), pull))
        if self.with_records:
            self._send(
                socket, (self._record(sequence) for sequence in self._all() if sequence % 2 == 0), f"{name}-dead"
            )
        nak = b"-NAK"
        self._send(
            socket,
            (
                b"PUB %b 4\r\n%b\r\n" % (late_ack_subject(name, "worker", sequence).encode(), nak)
                for sequence in self._all()
            ),
        )

    def _record(self, sequence: int) -> bytes:
        name = self.queue.name
        lines = {
            "Dead-Letter-Version": "1",
            "Dead-Letter-Sequence": sequence,
            "Dead-Letter-Subject": f"{name}.jobs.{sequence % 7}",
            "Dead-Letter-Reason": "max_deliveries",
            "Dead-Letter-Error-Class": f"Error{sequence % KINDS}",
            "Dead-Letter-Error-Message": f"no paper in tray {sequence}",
        }
        block = "NATS/1.0\r\n" + "".join(f"{key}: {value}\r\n" for key, value in lines.items()) + "\r\n"
        subject, header = copy_subject(name, "worker", sequence).encode(), block.encode()
        return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(header), len(header) + len(BODY), header, BODY)

    def _all(self) -> range:
        return range(1, self.letters + 1)

    def _send(self, socket: NatsSocket, frames: Iterable[bytes], stored_in: str = "") -> None:
        stream, sent, remaining = SourceStream(socket, stored_in), 0, iter(frames)
        while burst := list(islice(remaining, _BURST)):
            socket.send(b"".join(burst))
            sent += len(burst)
            # The server drops messages that arrive faster than it stores them.
            while stored_in and stream.info().last < sent:
                time.sleep(0.001)
            # A request after each burst keeps the server from falling behind.
            socket.request("$JS.API.INFO")
