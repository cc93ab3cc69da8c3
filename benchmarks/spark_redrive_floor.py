"""The server's least time for a redrive: every request of the protocol, sent bare, with nothing proved.

For each letter: the job is got, its copy published under an id, the audit's record published under an id, the original
acknowledged late, the dead letter queue's entry deleted. Requests are made beforehand but for the job's body, which all
letters share; answers are counted and not parsed. The steps of a letter follow one another, while those of other
letters overlap.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.contract import late_ack_subject, letter_audit_subject
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.spark.connection_options import socket_settings
from benchmarks.spark_fill import BODY

_BATCH = 250
_RECORD = b'{"version":1,"action":"redriven","padding":"%b"}' % (b"x" * 400)


class BareRedrive:
    """Redrives without parsing answers; jobs and entries are numbered from 1 on."""

    def __init__(self, url: str, queue: WorkQueue, letters: int) -> None:
        self._url = url
        self._letters = letters
        self._queue = queue

    def run(self) -> float:
        """Redrive, and return the seconds."""
        with closing(NatsSocket(socket_settings({"servers": self._url, "timeout": "60"}))) as socket:
            reply = f"{socket.inbox}.1".encode()
            steps = [
                self._steps(make, reply) for make in (self._get, self._copy, self._record, self._ack, self._delete)
            ]
            started, turn = time.perf_counter(), 0
            while True:
                batches = [frames for delay, step in enumerate(steps) if turn >= delay and (frames := next(step, None))]
                if not batches:
                    return time.perf_counter() - started
                socket.send(b"".join(frame for frames in batches for frame in frames))
                self._count(socket, sum(map(len, batches)))
                turn += 1

    def _steps(self, make: Callable[[int, bytes], bytes], reply: bytes) -> Iterator[list[bytes]]:
        for start in range(1, self._letters + 1, _BATCH):
            yield [make(sequence, reply) for sequence in range(start, min(start + _BATCH, self._letters + 1))]

    def _count(self, socket: NatsSocket, expected: int) -> None:
        prefix, tail, answered = socket.sid + b" ", b"", 0
        while answered < expected:
            socket.receive(lambda _buffer, _filled: True)
            data = tail + bytes(socket.buffer[: socket.filled])
            answered += data.count(prefix)
            # A prefix may be split between two reads.
            tail = data[-len(prefix) + 1 :]
            socket.consume(socket.filled)

    def _get(self, sequence: int, reply: bytes) -> bytes:
        return _request(f"$JS.API.DIRECT.GET.{self._queue.name}", reply, b'{"seq":%d}' % sequence)

    def _copy(self, sequence: int, reply: bytes) -> bytes:
        headers = {"Redrive-Count": 1, "Redrive-Stream": self._queue.name, "Redrive-Sequence": sequence}
        headers |= {"Redrive-Consumer": "worker", "Nats-Msg-Id": f"redrive:{self._queue.name}:{sequence}:{'t' * 30}"}
        return _publication(f"{self._queue.name}.jobs.{sequence % 7}", reply, headers, BODY)

    def _record(self, sequence: int, reply: bytes) -> bytes:
        headers = {"Nats-Msg-Id": f"audit:{'t' * 30}:{sequence}:redriven:{sequence}"}
        return _publication(letter_audit_subject(self._queue.name, sequence), reply, headers, _RECORD)

    def _ack(self, sequence: int, reply: bytes) -> bytes:
        return _request(late_ack_subject(self._queue.name, "worker", sequence), reply, b"+ACK")

    def _delete(self, sequence: int, reply: bytes) -> bytes:
        entry = b'{"seq":%d,"no_erase":true}' % sequence
        return _request(f"$JS.API.STREAM.MSG.DELETE.{self._queue.name}-dead", reply, entry)


def _request(subject: str, reply: bytes, body: bytes) -> bytes:
    return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(body), body)


def _publication(subject: str, reply: bytes, headers: Mapping[str, object], body: bytes) -> bytes:
    block = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    header = f"NATS/1.0\r\n{block}\r\n".encode()
    sizes = (len(header), len(header) + len(body))
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply, *sizes, header, body)
