"""What the server takes for a redrive at the least: every request of the protocol, bare, and nothing proved.

For each letter: the job is got, its copy published under an id, the audit's record published under an id, the original
acknowledged late, the dead letter queue's entry deleted. Requests are made beforehand but for the job's body, which all
letters share; answers are counted and not read. The steps of a letter follow one another, those of others go on
meanwhile.
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


class Bare:
    """Redrives without looking.

    :param url: the server
    :param queue: the queue, whose jobs are all dead
    :param letters: how many; jobs and entries are numbered from 1 on
    """

    def __init__(self, url: str, queue: WorkQueue, letters: int) -> None:
        self._url = url
        self._letters = letters
        self._queue = queue

    def run(self) -> float:
        """Redrive, and give the seconds."""
        with closing(NatsSocket(socket_settings({"servers": self._url, "timeout": "60"}))) as wire:
            reply = f"{wire.inbox}.1".encode()
            steps = [
                self._steps(make, reply) for make in (self._get, self._copy, self._record, self._ack, self._delete)
            ]
            begun, round_ = time.perf_counter(), 0
            while True:
                asked = [frames for late, step in enumerate(steps) if round_ >= late and (frames := next(step, None))]
                if not asked:
                    return time.perf_counter() - begun
                wire.send(b"".join(frame for frames in asked for frame in frames))
                self._count(wire, sum(map(len, asked)))
                round_ += 1

    def _steps(self, make: Callable[[int, bytes], bytes], reply: bytes) -> Iterator[list[bytes]]:
        for start in range(1, self._letters + 1, _BATCH):
            yield [make(at, reply) for at in range(start, min(start + _BATCH, self._letters + 1))]

    def _count(self, wire: NatsSocket, expected: int) -> None:
        mark, tail, answered = wire.sid + b" ", b"", 0
        while answered < expected:
            wire.receive(lambda _buffer, _filled: True)
            data = tail + bytes(wire.buffer[: wire.filled])
            answered += data.count(mark)
            # A mark may be cut in two.
            tail = data[-len(mark) + 1 :]
            wire.consume(wire.filled)

    def _get(self, at: int, reply: bytes) -> bytes:
        return _request(f"$JS.API.DIRECT.GET.{self._queue.name}", reply, b'{"seq":%d}' % at)

    def _copy(self, at: int, reply: bytes) -> bytes:
        told = {"Redrive-Count": 1, "Redrive-Stream": self._queue.name, "Redrive-Sequence": at}
        told |= {"Redrive-Consumer": "worker", "Nats-Msg-Id": f"redrive:{self._queue.name}:{at}:{'t' * 30}"}
        return _publication(f"{self._queue.name}.jobs.{at % 7}", reply, told, BODY)

    def _record(self, at: int, reply: bytes) -> bytes:
        told = {"Nats-Msg-Id": f"audit:{'t' * 30}:{at}:redriven:{at}"}
        return _publication(letter_audit_subject(self._queue.name, at), reply, told, _RECORD)

    def _ack(self, at: int, reply: bytes) -> bytes:
        return _request(late_ack_subject(self._queue.name, "worker", at), reply, b"+ACK")

    def _delete(self, at: int, reply: bytes) -> bytes:
        entry = b'{"seq":%d,"no_erase":true}' % at
        return _request(f"$JS.API.STREAM.MSG.DELETE.{self._queue.name}-dead", reply, entry)


def _request(subject: str, reply: bytes, body: bytes) -> bytes:
    return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(body), body)


def _publication(subject: str, reply: bytes, headers: Mapping[str, object], body: bytes) -> bytes:
    block = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    header = f"NATS/1.0\r\n{block}\r\n".encode()
    sizes = (len(header), len(header) + len(body))
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply, *sizes, header, body)
