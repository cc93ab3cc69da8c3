"""What a worker and a waiter read in a shorter way for most jobs is what the general way reads."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import astuple
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.client.wire import DeliveryForm, FrameReader, encode_message, encode_requests
from airflow_provider_jetstream.jetstream.contract import JOB_ADVISORY, JOB_ID, MSG_ID, TRACE_PARENT, end_id
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.publishing.job import (
    advisory_of,
    delivered_advisory,
    delivered_job_id,
    job_id_of,
)
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.waiting.ends import EndKind, parse_end
from airflow_provider_jetstream.worker.delivery import Delivery, PulledMessage
from airflow_provider_jetstream.worker.in_flight import JobRun
from airflow_provider_jetstream.worker.settlement import CompletionWriter

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.in_flight import JobStarter

QUEUE = "100%-orders"
TEXT = st.text(max_size=40) | st.sampled_from(["", "a", "redrive:1:x", "x" * 1_001, "Zoë", "\ufffd", " a ", "a\tb"])
BODY = st.sampled_from([b"", b"x", b"{}", b'{"id":"b"}', b'{"id":7,"advisory":"a.b"}', b'{"advisory":""}', b"[1]"])


@given(
    headers=st.dictionaries(st.sampled_from([JOB_ID, MSG_ID, JOB_ADVISORY, "X"]), TEXT),
    body=BODY,
    sequence=st.integers(1, 2**40),
)
def test_a_delivered_job_has_the_id_and_the_advisory_subject_of_the_stored_one(
    headers: dict[str, str], body: bytes, sequence: int
) -> None:
    assert delivered_job_id(headers, body, sequence) == job_id_of(headers.items(), body, sequence)
    assert (delivered_advisory(headers, body) or None) == (advisory_of(headers.items(), body) or None)


def test_the_short_form_of_a_completions_headers_has_its_id() -> None:
    queue = WorkQueue(
        name="orders", subjects=["orders"], consumers=[{"name": "w", "max_deliver": 1}], events="orders-events"
    )
    # No queue of the server may have a name with a percent sign; a declaration isn't what says so here.
    queue = queue.model_copy(update={"name": QUEUE})
    writer = CompletionWriter(cast("Connection", SimpleNamespace(max_payload=1 << 20)), queue, "w", "worker", ())
    pick = random.Random(1)  # noqa: S311
    for _ in range(2_000):
        exact, sequence = pick.randrange(10**18, 2 * 10**18), pick.randrange(1, 10**12)
        time = pick.choice([exact, exact // 10**9 * 10**9, exact // 1000 * 1000 + 500])
        message = PulledMessage("s", b"r", b"", {}, QUEUE, "w", sequence, 1, time)
        (subject,), (payload,), (headers,) = writer.requests([run_of(message)])
        assert subject == f"completed.{QUEUE}.w.{sequence}".encode()
        assert headers == encode_headers({MSG_ID: end_id(QUEUE, sequence, time)})
        assert json.loads(payload)["stream_seq"] == sequence


def test_completions_that_are_encoded_together_are_each_their_own_jobs() -> None:
    queue = WorkQueue(
        name="orders", subjects=["orders"], consumers=[{"name": "w", "max_deliver": 1}], events="orders-events"
    )
    writer = CompletionWriter(cast("Connection", SimpleNamespace(max_payload=1 << 20)), queue, "w", "worker", ())
    trace = {TRACE_PARENT: "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    found = [{MSG_ID: "a"}, {MSG_ID: "b", **trace}, {}, trace]
    runs = [
        run_of(PulledMessage("orders", b"r", b"", headers, "orders", "w", place + 1, 1, 10**18 + place))
        for place, headers in enumerate(found)
    ]
    runs[2].payload = b"encoded before"
    subjects, payloads, blocks = writer.requests(runs)
    assert subjects == [b"completed.orders.w.%d" % number for number in range(1, 5)]
    assert payloads[2] == b"encoded before"
    assert [json.loads(payloads[place])["job_id"] for place in (0, 1, 3)] == ["a", "b", "4"]
    for place, headers in enumerate(found):
        own = {MSG_ID: end_id("orders", place + 1, 10**18 + place)}
        assert blocks[place] == encode_headers(own | {name: headers[name] for name in trace if name in headers})


def run_of(message: PulledMessage) -> JobRun:
    return JobRun(cast("JobStarter", None), message, Delivery.of(message), 30.0, None, 0.0)


REPLIES = [
    b"$JS.ACK.q.w.1.7.3.1764140000000000000.9",
    b"$JS.ACK.1.2.3.4.5.6.7",
    b"$JS.ACK.hub.account.q.w.1.7.3.1764140000000000000.9.token",
    b"$JS.ACK.q.w.1.7.3.1764140000000000000.9.token",
    b"$JS.ACK.q.w.%b.7.3.4.5" % (b"1" * 19),
    b"$JS.ACK.q.w.x.7.3.4.5",
    b"$JS.ACK.q.w.1.7.3.4",
    b"elsewhere",
    b"",
]


@st.composite
def deliveries(draw: st.DrawFn) -> bytes:
    """A frame of a pull subscription: a job in any form, a status, or another subscription's message."""
    subject = draw(st.sampled_from([b"orders.new", b"caf\xe9", b"_INBOX.p.1", b"_INBOX.p.2.x", b"HMSG"]))
    reply, number = draw(st.sampled_from(REPLIES)), draw(st.sampled_from([4, 4, 4, 5]))
    block = draw(st.sampled_from([b"", b"NATS/1.0\r\nNats-Msg-Id: a\r\n\r\n", b"NATS/1.0 404 No Messages\r\n\r\n"]))
    body = draw(st.sampled_from([b"", b"x", b"\r\n", b"MSG orders.new 4 $JS.ACK.q.w.1.7.3.4.5 1\r\nx\r\n"]))
    fields = b"%b %d %b%b" % (subject, number, reply, b" " if reply else b"")
    if block:
        return b"HMSG %b%d %d\r\n%b%b\r\n" % (fields, len(block), len(block) + len(body), block, body)
    return b"MSG %b%d\r\n%b\r\n" % (fields, len(body), body)


@given(frames=st.lists(deliveries(), max_size=8), cuts=st.lists(st.integers(0, 600), max_size=4))
def test_jobs_that_are_parsed_many_at_a_time_are_those_parsed_one_by_one(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frames)
    assert _taken(data, cuts, together=True) == _taken(data, [], together=False)


def _taken(data: bytes, cuts: list[int], *, together: bool) -> list[object]:
    """Return what a pull subscription and another one get from a parser, and the parser's count of all."""
    taken: list[object] = []

    def take(subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
        if subject.startswith(b"_INBOX.p."):
            taken.append((subject, headers, payload))
            return
        with suppress(WireError):
            taken.append(PulledMessage.parse(subject, reply, headers, payload))

    reader = FrameReader()
    callbacks = {b"4": take, b"5": lambda *fields: taken.append(fields)}
    if together:
        reader.forms[b"4"] = form = DeliveryForm(b"_INBOX.p.", PulledMessage.of, taken.extend)
        form.bind(4)
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for start, end in pairwise(places):
        reader.feed(data[start:end])
        while reader.read(lambda sid, *fields: callbacks[sid](*fields), lambda *_: None, 3):
            pass
    return [*map(_fields, taken), reader.messages, reader.size]


def _fields(item: object) -> object:
    return astuple(item) if isinstance(item, PulledMessage) else item


@given(
    messages=st.lists(
        st.tuples(st.sampled_from([b"a.b", b"50%.%d", b"$JS.ACK.q"]), st.binary(max_size=20), st.binary(max_size=9)),
        max_size=5,
    ),
    first=st.integers(1, 10**12),
    has_headers=st.booleans(),
)
def test_requests_that_are_encoded_together_are_those_encoded_one_by_one(
    messages: list[tuple[bytes, bytes, bytes]],
    first: int,
    has_headers: bool,  # noqa: FBT001
) -> None:
    blocks = [encode_headers({MSG_ID: value.hex() or "none"}) for _, _, value in messages]
    together = encode_requests(
        [subject for subject, _, _ in messages],
        b"_INBOX.%s.",
        first,
        [payload for _, payload, _ in messages],
        blocks if has_headers else None,
    )
    assert together == b"".join(
        encode_message(subject, payload, block if has_headers else b"", b"_INBOX.%%s.%d" % number)
        for number, ((subject, payload, _), block) in enumerate(zip(messages, blocks, strict=True), first)
    )


@pytest.mark.parametrize("length", [1, 100, 101, 500, 501])
def test_a_completion_that_needs_no_checks_is_the_one_that_is_checked(length: int) -> None:
    queue = WorkQueue(
        name="orders", subjects=["orders"], consumers=[{"name": "w", "max_deliver": 1}], events="orders-events"
    )
    job = Delivery("j" * length, "orders", b"", {}, 7, 2)
    checked = CompletionWriter(cast("Connection", SimpleNamespace(max_payload=1 << 20)), queue, "w", "worker", ())
    assert checked.has_plain_form(job) is (length <= 500)
    # Larger than any completion with ids of a hundred characters; what comes beside it is reserved.
    limited = SimpleNamespace(max_payload=1024 + 510)
    writer = CompletionWriter(cast("Connection", limited), queue, "w", "worker", ())
    if writer.has_plain_form(job):
        assert len(writer.payload(job, None)) <= 510
    else:
        assert length > 100
    if length > 150:
        with pytest.raises(ValueError, match="expected a result whose completion has at most 510 bytes"):
            writer.payload(job, None)


def completion(**changes: Any) -> bytes:
    fields = {
        "id": "job-7",
        "timestamp": "2026-11-22T20:00:00.000001Z",
        "stream": "orders",
        "consumer": "w",
        "stream_seq": 7,
        "deliveries": 2,
        "type": "io.airflow.jetstream.v1.completion",
        "job_id": "job-7",
        "worker": "w-1",
    }
    return json.dumps({**fields, **changes}, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(
    ("body", "is_end"),
    [
        (completion(), True),
        (completion(worker="line\nbreak", job_id="Zoë"), True),
        (completion(result={"a": 1}), True),
        (completion(stream="others"), False),
        (completion(timestamp="2026-02-30T20:00:00.000001Z"), False),
        (completion(timestamp="0000-01-01T20:00:00.000001Z"), False),
        (completion(timestamp="2024-02-29T20:00:00Z"), True),
        (completion(consumer="a b"), False),
        (completion(consumer=""), True),
        (completion(consumer="w" * 256), False),
        (completion(stream_seq=-1), False),
        (completion(stream_seq=10**30), False),
        (completion(deliveries=0), True),
        (completion(id="x" * 10_001), False),
        (completion()[:-1], False),
        (completion() + b"}", False),
        (b"\xef\xbb\xbf" + completion(), False),
    ],
)
def test_a_plain_completion_is_the_end_that_its_model_is(body: bytes, is_end: bool) -> None:  # noqa: FBT001
    end = parse_end(body, 3, "orders")
    # White space makes no difference to the model, and keeps the shorter way from being taken.
    assert end == parse_end(b" " + body, 3, "orders")
    assert (end is not None) is is_end
    if end is not None:
        assert (end.kind, end.sequence, end.event_sequence) == (EndKind.COMPLETED, 7, 3)
