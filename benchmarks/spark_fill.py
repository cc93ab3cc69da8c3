"""A queue whose jobs are all dead, by the hundred thousand: over bare connections, since clients would take minutes."""

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


class Fill:
    """Makes a queue whose jobs are all dead.

    :param url: the server
    :param name: the queue's name
    :param letters: how many
    :param told: whether a worker has told of the error of every other one, of a hundred kinds
    :param declared: further fields of the queue
    """

    def __init__(self, url: str, name: str, letters: int, *, told: bool = True, **declared: Any) -> None:
        self.url = url
        self.letters = letters
        self.told = told
        fields: dict[str, Any] = {
            "name": name,
            "subjects": [f"{name}.jobs.*"],
            "consumers": [{"name": "worker", "max_deliver": 1, "ack_wait": "1s", "max_ack_pending": -1}],
            "dead_letters": f"{name}-dead",
            "archive": False,
            **declared,
        }
        self.queue = WorkQueue(**fields)

    async def run(self) -> WorkQueue:
        """Make it."""
        settings = connection_settings({"servers": (self.url,), "timeout": 30})
        async with connect(settings) as connection:
            await provision(connection, self.queue)
            with closing(NatsSocket(socket_settings({"servers": self.url, "timeout": "60"}))) as wire:
                self._publish(wire)
                self._deliver(wire)
            count = self.letters + (self.letters // 2 if self.told else 0)
            while (await stream_info(connection, f"{self.queue.name}-dead"))["state"]["messages"] < count:
                await probe_consumer(connection, self.queue.name, "worker")
        return self.queue

    def _publish(self, wire: NatsSocket) -> None:
        name = self.queue.name
        jobs = (b"PUB %b.jobs.%d %d\r\n%b\r\n" % (name.encode(), at % 7, len(BODY), BODY) for at in self._all())
        self._send(wire, jobs, name)

    def _deliver(self, wire: NatsSocket) -> None:
        name, stream = self.queue.name, SourceStream(wire, self.queue.name)
        while pending := stream.api(f"CONSUMER.INFO.{name}.worker")["num_pending"]:
            pull = json.dumps({"batch": min(pending, _BURST), "no_wait": True}).encode()
            topic = f"$JS.API.CONSUMER.MSG.NEXT.{name}.worker {wire.new_reply_subject()}"
            # The jobs come before the answer to the next question, which drops them.
            wire.send(b"PUB %b %d\r\n%b\r\n" % (topic.encode(), len(pull), pull))
        if self.told:
            self._send(wire, (self._record(at) for at in self._all() if at % 2 == 0), f"{name}-dead")
        nak = b"-NAK"
        self._send(
            wire,
            (b"PUB %b 4\r\n%b\r\n" % (late_ack_subject(name, "worker", at).encode(), nak) for at in self._all()),
        )

    def _record(self, at: int) -> bytes:
        name = self.queue.name
        lines = {
            "Dead-Letter-Version": "1",
            "Dead-Letter-Sequence": at,
            "Dead-Letter-Subject": f"{name}.jobs.{at % 7}",
            "Dead-Letter-Reason": "max_deliveries",
            "Dead-Letter-Error-Class": f"Error{at % KINDS}",
            "Dead-Letter-Error-Message": f"no paper in tray {at}",
        }
        block = "NATS/1.0\r\n" + "".join(f"{key}: {value}\r\n" for key, value in lines.items()) + "\r\n"
        subject, header = copy_subject(name, "worker", at).encode(), block.encode()
        return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(header), len(header) + len(BODY), header, BODY)

    def _all(self) -> range:
        return range(1, self.letters + 1)

    def _send(self, wire: NatsSocket, frames: Iterable[bytes], stored_in: str = "") -> None:
        stream, sent, left = SourceStream(wire, stored_in), 0, iter(frames)
        while burst := list(islice(left, _BURST)):
            wire.send(b"".join(burst))
            sent += len(burst)
            # The server drops what comes faster than it stores.
            while stored_in and stream.info().last < sent:
                time.sleep(0.001)
            # A question for each burst keeps it from falling behind with the rest.
            wire.request("$JS.API.INFO")
