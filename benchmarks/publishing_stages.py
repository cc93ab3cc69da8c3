"""Where the client's time goes when jobs are published: each stage by itself, without a server, in this process.

What a server and the kernel do isn't here; nor is the event loop, which reads and writes some hundred times a second.
"""

from __future__ import annotations

import sys
import time
from array import array
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.wire import PublishAckForm
from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from benchmarks.report import Sample, Table, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from airflow_provider_jetstream.jetstream.publishing.batch import Batch

_PREFIX = b"_INBOX.abcdefghijklmnopqrstuv."
# As much as the event loop reads at once.
_READ = 1 << 16
_ROUNDS = 5


class _Stages:
    """Measures stages of publishing some bodies.

    :ivar measured: by the name of a stage, its rounds
    """

    def __init__(self, count: int, size: int) -> None:
        self.measured: dict[str, list[Sample]] = {}
        self._count = count
        self._bodies = [b"%0*d" % (size, number) for number in range(count)]
        data = b"".join(_answer(number) for number in range(count))
        self._answers = [data[start : start + _READ] for start in range(0, len(data), _READ)]

    def _note(self, name: str, stage: Callable[[], object]) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        stage()
        sample = Sample(self._count, time.perf_counter() - began, time.process_time() - cpu)
        self.measured.setdefault(name, []).append(sample)

    def measure(self, origin: Origin | None) -> None:
        """Measure all stages once."""
        prepared = PreparedJobs(self._bodies, subject="jobs.new", origin=origin, batch="b", by_key=True)
        batches: list[Batch] = []
        what = "a task's jobs" if origin else "jobs"

        def prepare() -> None:
            batches.extend(prepared.batches())

        self._note(f"check {what}", prepare)
        if origin:
            self._note("make rows for a task's manifest", lambda: [batch.row_columns() for batch in batches])
        self._note(f"encode {what}", lambda: [batch.encode(_PREFIX, 0) for batch in batches])
        if origin:
            return
        sequences = array("Q", bytes(8 * self._count))
        self._note("match PubAcks", lambda: self._take(sequences))
        if 0 in sequences:
            raise SystemExit("expected a sequence for each job")

    def _take(self, known: array[int]) -> None:
        def record(indexes: Sequence[int], sequences: Sequence[int]) -> None:
            for index, sequence in zip(indexes, sequences, strict=True):
                known[index] = sequence

        acks = PublishAckForm(_PREFIX, "jobs", "", record)
        acks.bind(1)
        rest = b""
        for data in self._answers:
            rest += data
            rest = rest[acks.take(rest, 0)[0] :]


def _answer(number: int) -> bytes:
    body = b'{"stream":"jobs","seq":%d}' % (number + 1)
    return b"MSG %b%d 1 %d\r\n%b\r\n" % (_PREFIX, number, len(body), body)


def stages(count: int, size: int) -> Table:
    """Measure the stages of a call, and those of a task with its manifest."""
    measuring = _Stages(count, size)
    for _ in range(_ROUNDS):
        measuring.measure(None)
        measuring.measure(Origin("dag", "run", "task"))
    return Table(f"stages, {size} B", "jobs", [Way(name, samples) for name, samples in measuring.measured.items()])


def main() -> int:
    """Print the stages of both sizes."""
    for size in (200, 1024):
        print("\n".join(stages(100_000, size).lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
