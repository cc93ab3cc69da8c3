"""How a run ends: its completion is stored, then its delivery acknowledged, both confirmed, and its outcome logged.

After a crash between the two the job runs once more, and the server drops its second completion as a duplicate of the
first. The other order could lose the completion. What the server drops is believed only once the end that is stored has
been read: anybody who may store something in the events stream can use the id of a completion.

Both requests are written together with the requests of the other jobs that are done in the same turn of the event loop,
and confirmed in the background, without a task or a timer. Where a confirmation doesn't come, or isn't one, a task of
the run's own repeats what isn't confirmed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from itertools import repeat
from math import inf
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from airflow_provider_jetstream.jetstream.cancellation.cancel import cancelled_message
from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.client.publish_ack import (
    are_plain_publish_acks,
    parse_publish_ack,
    store_once,
)
from airflow_provider_jetstream.jetstream.client.subjects import advisory_problem
from airflow_provider_jetstream.jetstream.client.wire import AnswerForm, encode_message, encode_requests, encode_subject
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text
from airflow_provider_jetstream.jetstream.contract import (
    JOB_ADVISORY,
    MSG_ID,
    TRACE_PARENT,
    TRACE_STATE,
    completion_subject,
    end_id,
)
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    PermissionDeniedError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.limits import TRACE_PARENT as LONGEST_TRACE_PARENT
from airflow_provider_jetstream.jetstream.limits import TRACE_STATE as LONGEST_TRACE_STATE
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.worker.acknowledgement import ANSWER_TIMEOUT, end_delivery, send_until_confirmed
from airflow_provider_jetstream.worker.logs import DeliveryOutcome, is_outcome_logged, log_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from airflow_provider_jetstream.jetstream.advisories import Completion
    from airflow_provider_jetstream.jetstream.cancellation.cancel import Cancellation
    from airflow_provider_jetstream.jetstream.client.connection import Connection, Subscription
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.worker.delivery import Delivery, PulledMessage
    from airflow_provider_jetstream.worker.in_flight import InFlightJobs, JobRun
    from airflow_provider_jetstream.worker.metrics import ConsumerMetrics

    Ended: TypeAlias = tuple[DeliveryOutcome, Exception | None]


log = logging.getLogger("jetstream.worker")

_HEADER_RESERVE = 1024
# Of a sequence and a number of deliveries.
_NUMBER_DIGITS = 40
# JSON has these characters as they are.
_PLAIN_ID = re.compile(r"[ !#-\[\]-~]{1,500}")
_TRACE = {TRACE_PARENT: LONGEST_TRACE_PARENT, TRACE_STATE: LONGEST_TRACE_STATE}
# More than any number of a request has, and few enough for int().
_MOST_DIGITS: Final = 18


class CompletionWriter:
    """Stores the completions and cancellations of one consumer's jobs.

    :param advisory_subjects: those of the queue's advisory subjects that its events stream captures on the server, and
        therefore no other stream

    :ivar has_events: whether completions are stored
    """

    def __init__(
        self,
        connection: Connection,
        queue: WorkQueue,
        consumer: str,
        worker: str,
        advisory_subjects: tuple[str, ...],
    ) -> None:
        self._connection = connection
        self._queue = queue
        self.has_events = queue.events is not None
        self._consumer = consumer
        self._worker = worker
        self._advisory_subjects = advisory_subjects
        self._has_explained = False
        self._subject = completion_subject(queue.name, consumer, 0)[:-1].encode().replace(b"%", b"%%") + b"%d"
        # The headers of a completion, as :func:`end_id` has its id.
        self._id_block = b"NATS/1.0\r\n%b: done:%b:%%d:%%d\r\n\r\n" % (
            MSG_ID.encode(),
            queue.name.encode().replace(b"%", b"%%"),
        )
        self._template = _template(queue.name, consumer, worker)
        # The bytes of a completion without its two ids.
        self._plain_size = len(self._template.encode()) + len(_now()) + _NUMBER_DIGITS

    def has_plain_form(self, job: Delivery) -> bool:
        """Return whether the completion without a result needs no checks: :meth:`requests` encodes it."""
        room = self._connection.max_payload - _HEADER_RESERVE - self._plain_size
        return 2 * len(job.id) <= room and _PLAIN_ID.fullmatch(job.id) is not None

    def payload(self, job: Delivery, result: Any) -> bytes:
        """Encode a completion with what the handler returned.

        :raises ValueError: the result isn't JSON, or too large
        """
        if result is None and _PLAIN_ID.fullmatch(job.id):
            return self._bounded(self._plain(job, _now()))
        from airflow_provider_jetstream.jetstream.advisories import Completion

        completion = Completion(
            id=job.id,
            timestamp=datetime.now(UTC),
            stream=self._queue.name,
            consumer=self._consumer,
            stream_seq=job.sequence,
            deliveries=job.attempt,
            job_id=job.id,
            worker=self._worker,
            result=result,
        )
        return self._bounded(_encode(completion))

    def _plain(self, job: Delivery, now: str) -> bytes:
        return (self._template % (job.id, now, job.sequence, job.attempt, job.id)).encode()

    def requests(self, runs: Sequence[JobRun]) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Return subjects, payloads and headers of the runs' completions; encodes the completions that aren't yet."""
        now = _now()
        for run in runs:
            if not run.payload:
                run.payload = self._plain(run.job, now)
        sequences = [run.message.sequence for run in runs]
        times = [run.message.stored_nanoseconds for run in runs]
        subjects = list(map(self._subject.__mod__, sequences))
        blocks = list(map(self._id_block.__mod__, zip(sequences, times, strict=True)))
        for position, run in enumerate(runs):
            if TRACE_PARENT in (headers := run.job.headers) or TRACE_STATE in headers:
                msg_id = end_id(self._queue.name, sequences[position], times[position])
                blocks[position] = encode_headers({MSG_ID: msg_id, **_trace(headers)})
        return subjects, [run.payload for run in runs], blocks

    def _bounded(self, payload: bytes) -> bytes:
        if len(payload) > (limit := self._connection.max_payload - _HEADER_RESERVE):
            raise ValueError(
                f"expected a result whose completion has at most {limit} bytes, found {len(payload)}: return a"
                " reference instead of the data"
            )
        return payload

    async def store_cancellation(self, message: PulledMessage, job: Delivery, cancellation: Cancellation) -> None:
        """Store that a job was cancelled, in the place of its completion."""
        end = cancelled_message(
            cancellation,
            queue=self._queue.name,
            consumer=self._consumer,
            sequence=job.sequence,
            stored_nanoseconds=message.stored_nanoseconds,
            deliveries=job.attempt,
            worker=self._worker,
        )
        await self._store_end(job, end.body, end.headers, "cancellation")

    async def store(self, message: PulledMessage, job: Delivery, payload: bytes) -> None:
        """Store an encoded completion, and publish it on the job's advisory subject where it has one."""
        trace = _trace(job.headers)
        if self._queue.events:
            # The time distinguishes this job from one with the same sequence in a recreated stream.
            msg_id = end_id(self._queue.name, job.sequence, message.stored_nanoseconds)
            await self._store_end(job, payload, {MSG_ID: msg_id, **trace}, "completion")
        if not (advisory := self._reported_on(job)):
            return
        publish_advisory = partial(self._connection.publish, advisory, payload, trace or None)
        # Nothing confirms it; but while the connection is lost, it isn't even sent.
        await send_until_confirmed(publish_advisory, f"the advisory of job {job.shown_id}")

    async def _store_end(self, job: Delivery, payload: bytes, headers: dict[str, str], what: str) -> None:
        subject = completion_subject(self._queue.name, self._consumer, job.sequence)
        is_own = partial(_is_end, (self._queue.name, self._consumer, job.sequence))
        publish = partial(store_once, self._connection, subject, payload, headers, is_own, time_limit=ANSWER_TIMEOUT)
        await send_until_confirmed(publish, f"the {what} of job {job.shown_id}")

    @staticmethod
    def are_stored(answers: Sequence[bytes]) -> bool:
        """Return whether all of some answers confirm that a completion is stored, and wasn't before."""
        return are_plain_publish_acks(answers) or all(map(_is_stored, answers))

    def reports(self, runs: Iterable[JobRun]) -> bytes:
        """Encode the messages for the advisory subjects of jobs; empty where none has one of the queue's."""
        # Most jobs say at once that they name none.
        named = [run for run in runs if JOB_ADVISORY in run.job.headers or run.job.body.startswith(b"{")]
        return b"".join(map(self._report, named))

    def _report(self, run: JobRun) -> bytes:
        if not (advisory := self._reported_on(run.job)):
            return b""
        trace = _trace(run.job.headers)
        return encode_message(encode_subject(advisory), run.payload, encode_headers(trace) if trace else b"")

    def _reported_on(self, job: Delivery) -> str | None:
        if not (advisory := job.advisory):
            return None
        if problem := advisory_problem(advisory, self._advisory_subjects):
            self._log_refusal(job, advisory, problem)
            return None
        return advisory

    def _log_refusal(self, job: Delivery, advisory: str, problem: str) -> None:
        if not self._advisory_subjects:
            if self._has_explained:
                return
            # Jobs of a queue without any may name subjects for somebody else.
            self._has_explained = True
        log.warning("%s doesn't report job %s to %s: %s", self._worker, job.shown_id, shown_value(advisory), problem)


def _is_stored(answer: bytes) -> bool:
    try:
        return not parse_publish_ack("a completion", answer).duplicate
    except (ApiError, TransientError):
        return False


def _is_end(place: tuple[str, str, int], stored: StoredMessage) -> bool:
    """Return whether a stored message is the end of a job, by queue, consumer and stream sequence."""
    from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion, parse_advisory

    end = parse_advisory(stored.data)
    return isinstance(end, Completion | Cancelled) and (end.stream, end.consumer, end.stream_seq) == place


def _now() -> str:
    """Return the time as text, in UTC and microseconds, without its zone."""
    return datetime.now(UTC).isoformat(timespec="microseconds")[:-6]


def _template(queue: str, consumer: str, worker: str) -> str:
    """Return a completion without a result as text, as pydantic writes it: id, time, sequence, deliveries, id."""
    fields = {"stream": queue, "consumer": consumer, "worker": one_line(worker) or ""}
    text = {name: json.dumps(value, ensure_ascii=False).replace("%", "%%") for name, value in fields.items()}
    return (
        f'{{"id":"%s","timestamp":"%sZ","stream":{text["stream"]},"consumer":{text["consumer"]},"stream_seq":%d,'
        f'"deliveries":%d,"type":"io.airflow.jetstream.v1.completion","job_id":"%s","worker":{text["worker"]}}}'
    )


def _encode(completion: Completion) -> bytes:
    """Encode a completion; what isn't UTF-8 in it, such as half of a character in a job's JSON, is replaced.

    :raises ValueError: the result isn't JSON
    """
    from pydantic_core import PydanticSerializationError

    try:
        return completion.model_dump_json(exclude_none=True).encode()
    except PydanticSerializationError:
        values = completion.model_dump(mode="json", exclude_none=True)
        # By way of UTF-16, which puts both halves of a character together.
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _trace(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace context among a job's headers; nothing that a completion couldn't hold."""
    found = {name: headers.get(name, "") for name in _TRACE}
    return {
        name: value
        for name, value in found.items()
        if 0 < len(value) <= _TRACE[name] and value.isascii() and value.isprintable()
    }


_Item = TypeVar("_Item")


class Confirmations(Generic[_Item]):
    """Sends a request for each of some items, and hands on what is confirmed; has no time limits of its own.

    :param confirms: returns whether all of some answers are confirmations
    :param on_confirmed: takes items whose requests are confirmed, at least one
    :param on_refused: takes an item whose request is answered in another way, or denied
    """

    def __init__(
        self,
        connection: Connection,
        confirms: Callable[[Sequence[bytes]], bool],
        on_confirmed: Callable[[Sequence[_Item]], None],
        on_refused: Callable[[_Item], None],
    ) -> None:
        self._connection = connection
        self._confirms = confirms
        self._on_confirmed = on_confirmed
        self._on_refused = on_refused
        inbox = connection.new_inbox()
        self._prefix = f"{inbox}.".encode()
        self._filter = f"{inbox}.*"
        self._subscription: Subscription | None = None
        self._next = 1
        # By number as the answer's subject has it: the item, and the subject of its request.
        self._open: dict[int, tuple[_Item, bytes]] = {}

    async def __aenter__(self) -> Self:
        form = AnswerForm(self._prefix, self._on_answers)
        self._subscription = await self._connection.subscribe_raw(self._filter, self._on_message, self._on_denied, form)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._subscription:
            await self._subscription.unsubscribe()

    def request(
        self,
        items: Sequence[_Item],
        subjects: Sequence[bytes],
        payloads: Sequence[bytes],
        headers: Sequence[bytes] | None = None,
    ) -> range:
        """Send a request for each item, and return the numbers of the requests.

        :param headers: encoded; ``None`` where no request has any
        :raises UnreachableError: the connection is lost; nothing is sent, now or later
        """
        first, self._next = self._next, self._next + len(items)
        numbers = range(first, self._next)
        self._connection.write(encode_requests(subjects, self._prefix, first, payloads, headers), len(items))
        self._open.update(zip(numbers, zip(items, subjects, strict=True), strict=True))
        return numbers

    def forget(self, number: int) -> None:
        """Ignore the answer to a request from now on."""
        self._open.pop(number, None)

    def _on_message(self, subject: bytes, _: bytes, headers: bytes | None, payload: bytes) -> None:
        number = subject[len(self._prefix) :]
        if number.isdigit() and len(number) <= _MOST_DIGITS:
            self._on_answer(int(number), headers is None and self._confirms([payload]))

    def _on_answer(self, number: int, confirms: bool) -> None:  # noqa: FBT001
        if entry := self._open.pop(number, None):
            if confirms:
                self._on_confirmed([entry[0]])
            else:
                self._on_refused(entry[0])

    def _on_answers(self, numbers: Sequence[int], bodies: Sequence[bytes]) -> None:
        try:
            if self._confirms(bodies):
                # An answer may come after its request was forgotten, and sent again.
                if items := [entry[0] for entry in map(self._open.pop, numbers, repeat(None)) if entry]:
                    self._on_confirmed(items)
            else:
                for number, body in zip(numbers, bodies, strict=True):
                    self._on_answer(number, self._confirms([body]))
        except Exception:
            # Their requests are sent again after a while.
            log.exception("%d answers can't be taken", len(numbers))

    def _on_denied(self, denial: PermissionDeniedError) -> None:
        is_inbox = denial.subject == self._filter
        for number, (_, subject) in list(self._open.items()):
            answered_on = self._prefix + b"%d" % number
            if is_inbox or denial.subject in (decode_text(subject), decode_text(answered_on)):
                self._on_answer(number, confirms=False)


class JobSettlement:
    """Ends the runs of one consumer's jobs.

    :param completions: stores their completions
    :param jobs: the jobs in flight
    """

    def __init__(
        self,
        connection: Connection,
        worker: str,
        completions: CompletionWriter,
        jobs: InFlightJobs,
        metrics: ConsumerMetrics,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self.completions = completions
        self.jobs = jobs
        self._metrics = metrics
        self._done: list[JobRun] = []
        self._loop = asyncio.get_running_loop()
        self._stack = AsyncExitStack()
        self._stores = Confirmations(connection, completions.are_stored, self._on_stored, self._on_refused)
        # Whatever the server answers, it has taken the acknowledgement.
        self._acknowledgements = Confirmations(connection, _any, self._on_acknowledged, self._on_refused)

    async def __aenter__(self) -> Self:
        for confirmations in (self._stores, self._acknowledgements):
            await self._stack.enter_async_context(confirmations)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def repeat(self, run: JobRun) -> None:
        """Send the request of a run again that isn't confirmed in time."""
        run.answer_at = inf
        (self._acknowledgements if run.is_stored else self._stores).forget(run.request)
        log.warning("the end of job %s isn't confirmed yet, sending it again", run.job.shown_id)
        self.do(run, self._settle_again(run, drop_unsent=True))

    def do(self, run: JobRun, steps: Coroutine[Any, Any, Ended]) -> None:
        """Let a task do the rest of a run."""
        run.task = asyncio.create_task(self._finish(run, steps))

    async def _finish(self, run: JobRun, steps: Coroutine[Any, Any, Ended]) -> None:
        outcome: DeliveryOutcome = DeliveryOutcome.UNSETTLED
        error: Exception | None = None
        try:
            outcome, error = await steps
        except Exception as unsettled:  # noqa: BLE001 - it is logged, and the job comes back after its ack wait
            error = unsettled
            if isinstance(unsettled, PermissionDeniedError):
                self.jobs.denial = unsettled
        finally:
            self._end((run,), outcome, error)

    def _end(self, runs: Sequence[JobRun], outcome: DeliveryOutcome, error: Exception | None = None) -> None:
        self.jobs.end(runs, outcome)
        now, is_logged = self._loop.time(), is_outcome_logged(outcome)
        self._metrics.record_deliveries(outcome, [now - run.began for run in runs])
        if is_logged:
            for run in runs:
                log_outcome(self._worker, run.message, run.job, outcome, error, now - run.began)

    def store(self, run: JobRun) -> None:
        """Free the slot, and store the completion together with the others of this turn of the event loop."""
        self.jobs.release(run)
        if not self._done:
            self._loop.call_soon(self._store)
        self._done.append(run)

    def _store(self) -> None:
        runs, self._done = self._done, []
        if not self.completions.has_events:
            self._on_stored(runs)
            return
        subjects, payloads, headers = self.completions.requests(runs)
        self._request(self._stores, runs, subjects, payloads, headers)

    def _on_stored(self, runs: Sequence[JobRun]) -> None:
        for run in runs:
            run.is_stored = True
        try:
            if reports := self.completions.reports(runs):
                self._connection.write(reports)
        except UnreachableError:
            for run in runs:
                run.is_stored = False
                self._on_refused(run)
            return
        reconnects = self._connection.reconnects
        for run in runs:
            if run.reconnects != reconnects:
                self._on_refused(run)
        if not (runs := [run for run in runs if run.reconnects == reconnects]):
            return
        subjects = [run.message.ack_subject for run in runs]
        self._request(self._acknowledgements, runs, subjects, [b"+ACK"] * len(runs))

    def _on_acknowledged(self, runs: Sequence[JobRun]) -> None:
        self._end(runs, DeliveryOutcome.COMPLETED)

    def _on_refused(self, run: JobRun) -> None:
        self.do(run, self._settle_again(run))

    def _request(
        self,
        confirmations: Confirmations[JobRun],
        runs: Sequence[JobRun],
        subjects: Sequence[bytes],
        payloads: Sequence[bytes],
        headers: Sequence[bytes] | None = None,
    ) -> None:
        try:
            numbers = confirmations.request(runs, subjects, payloads, headers)
        except UnreachableError:
            for run in runs:
                self._on_refused(run)
            return
        answer_at = self._loop.time() + ANSWER_TIMEOUT
        for run, number in zip(runs, numbers, strict=True):
            run.request = number
            run.answer_at = answer_at
            run.due = min(answer_at, run.signal_at)
        self.jobs.sweep.expect(min(run.due for run in runs))

    async def _settle_again(self, run: JobRun, *, drop_unsent: bool = False) -> Ended:
        """Repeat what isn't confirmed until it is; both requests may arrive twice."""
        run.answer_at = inf
        if drop_unsent:
            await self._connection.drop_unsent()
        if not run.is_stored:
            await self.completions.store(run.message, run.job, run.payload)
        await self._acknowledge(run, None)
        return DeliveryOutcome.COMPLETED, None

    async def acknowledge(self, run: JobRun) -> None:
        """Acknowledge a job, until that is confirmed."""
        await self._acknowledge(run, run.reconnects)

    async def _acknowledge(self, run: JobRun, reconnects: int | None) -> None:
        what = f"the acknowledgement of job {run.job.shown_id}"
        await end_delivery(self._connection, run.message, b"+ACK", what, reconnects=reconnects)


def _any(_: Sequence[bytes]) -> bool:
    return True
