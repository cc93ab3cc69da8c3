"""Whatever arrives from outside, each parser ends with a value or an error of the tree, soon and in little memory.

Two seconds for each parser; ``make fuzz`` gives each a minute (``FUZZ_SECONDS``).
"""

from __future__ import annotations

import json
import logging
import os
import time
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from airflow_provider_jetstream.jetstream.advisories import parse_advisory, parse_cancellation_request
from airflow_provider_jetstream.jetstream.audit.intent import IntentRecord
from airflow_provider_jetstream.jetstream.audit.lease import LeaseState, _parse
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord, parse_record
from airflow_provider_jetstream.jetstream.client.diagnostics import decode_answer
from airflow_provider_jetstream.jetstream.client.headers import Headers, encode_headers, first_values, parse_headers
from airflow_provider_jetstream.jetstream.client.message import StoredMessage, parse_direct_get, parse_msg_get
from airflow_provider_jetstream.jetstream.client.publish_ack import parse_publish_ack
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.subjects import advisory_problem, subject_problem
from airflow_provider_jetstream.jetstream.client.wire import FrameReader, next_frame, parse_server_info, server_version
from airflow_provider_jetstream.jetstream.client.wire_text import decode_text
from airflow_provider_jetstream.jetstream.dead_letters.entry import _read_advisory
from airflow_provider_jetstream.jetstream.dead_letters.record import (
    parse_origin,
    parse_pairs,
    read_outline,
    read_record,
)
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.jetstream.publishing.advised_jobs import reported_job
from airflow_provider_jetstream.jetstream.publishing.manifest_record import parse_manifest_record
from airflow_provider_jetstream.jetstream.queue.queue_file import parse_queue_yaml
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import parse_duration, parse_seconds, parse_size, parse_time
from airflow_provider_jetstream.jetstream.waiting.ends import parse_end
from airflow_provider_jetstream.worker.delivery import Delivery, PulledMessage
from airflow_provider_jetstream.worker.errors import GiveUpError
from airflow_provider_jetstream.worker.executor import attempt_seconds, check_expiry, seconds_until_due
from airflow_provider_jetstream.worker.logs import JsonFormatter, TextFormatter
from airflow_provider_jetstream.worker.settlement import CompletionWriter, _trace

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
_LARGEST = 60_000
# For the largest input; linear work on it takes some milliseconds, on a machine with other work perhaps a second.
_MOST_SECONDS = 20.0
_MOST_BYTES = 64 << 20

_NOW = datetime(2026, 11, 21, tzinfo=UTC)
_TIME = "2026-11-21T00:00:00.123456789Z"

# What has broken parsers before: bytes that aren't UTF-8, halves of characters, levels, digits, ends of lines.
_HOSTILE = [
    *(b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\udfff", b"\0", b"\x0b", b"\x1b[2K", b"\r\n", b"\n", b"\r", b"\x85"),
    *("\u2028".encode(), "\ufffd".encode(), b"9" * 5_000, b"-1", b"1e999", b"NaN", b"Infinity", b"1s", b"0.", b"_"),
    *(b"[", b"]", b"{", b"}", b'"', b":", b",", b" ", b"\t", b"- ", b"&a ", b"*a", b"!!python/object ", b"<<: ", b"%"),
    *(b"null", b"true", b"[]", b"{}", b'""', b"0001-01-01T00:00:00+23:59", b"9999-12-31T23:59:59-23:59", b"2026-11-21"),
]


def _documents(*pieces: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy of documents of a grammar's pieces, hostile ones and repetitions."""
    piece = st.sampled_from([*pieces, *_HOSTILE]) | st.binary(max_size=6)
    joined = st.lists(piece, max_size=10).map(b"".join)
    repeated = st.builds(lambda part, count: part * count, joined, st.integers(1, _LARGEST))
    return st.builds(lambda *parts: b"".join(parts)[:_LARGEST], joined, repeated | joined, joined)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, 2**63, 2**64, -1, 0, 1])
    | st.floats()
    | st.text(st.characters(codec=None), max_size=6)
    | st.sampled_from(["9" * 5_000, "\ud800", "x" * 20_000, _TIME, "a\nb", "\x1b", "0001-01-01T00:00:00+23:59", "q"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)


def _changed(valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Return a strategy of JSON objects that differ from a valid one in some fields, and of other documents."""
    changes = st.dictionaries(st.sampled_from(sorted(valid)), _VALUES, max_size=3)
    return changes.map(lambda changed: json.dumps(valid | changed).encode()) | _documents(json.dumps(valid).encode())


def _header_lines(*names: str) -> st.SearchStrategy[bytes]:
    pieces = [f"{name}: ".encode() for name in names]
    return _documents(*pieces, b"\r\n", b"\r\n ").map(lambda lines: b"NATS/1.0\r\n" + lines + b"\r\n\r\n")


def _stored(headers: bytes = b"", data: bytes = b"", subject: str = "dead.q.w.7") -> StoredMessage:
    return StoredMessage(subject, 3, _TIME, parse_headers(headers), data)


def _delivery(raw: bytes, body: bytes = b"") -> Delivery:
    headers = dict(parse_headers(raw))
    return Delivery(id="7", subject="q", body=body, headers=headers, sequence=7, attempt=1)


def _refusal(parse: Callable[[Any], object], value: object) -> str:
    try:
        parse(value)
    except ValueError as error:
        return str(error)
    return ""


def _parse_frames(data: bytes) -> None:
    reader = FrameReader()
    for start in range(0, len(data), 8_192):
        reader.feed(data[start : start + 8_192])
        while reader.read(lambda *_: None, lambda *_: None, 64):
            pass


def _parse_blocking_frames(data: bytes) -> None:
    position = 0
    while frame := next_frame(data, position, len(data)):
        position = frame.end


def _parse_headers(raw: bytes) -> None:
    pairs = parse_headers(raw)
    encode_headers(Headers(pairs))
    "".join(first_values(raw).values()).encode()


def _parse_units(data: bytes) -> None:
    for text in (data.decode(errors="replace"), data.decode(errors="surrogateescape")):
        for parse in (parse_duration, parse_seconds, parse_size, parse_time):
            assert len(_refusal(parse, text)) < 1_000


def _parse_queue(content: bytes) -> None:
    if problem := _refusal(parse_queue_yaml, content):
        assert problem.startswith("expected")
    elif not isinstance(value := parse_queue_yaml(content), str):
        # Text would be the path of another file.
        WorkQueue.load(value)


def _work_on(raw: bytes) -> None:
    job = _delivery(raw)
    attempt_seconds(job, 60.0)
    for check in (lambda: check_expiry(job, _NOW, _NOW), lambda: seconds_until_due(job, _NOW)):
        # The job is a dead letter.
        with suppress(GiveUpError):
            check()
    for value in _trace(job.headers).values():
        value.encode("ascii")
    if advisory := job.advisory:
        advisory_problem(advisory, ("a.>",))
        subject_problem(advisory)
    assert job.redrives >= 0


def _complete(body: bytes) -> None:
    job = _delivery(b"NATS/1.0\r\n\r\n", body)
    job.shown_id.encode()
    queue: Any = SimpleNamespace(name="q", events=None, advisory_subjects=())
    connection: Any = SimpleNamespace(max_payload=1 << 20)
    try:
        result = job.json()
    except ValueError:
        return
    event = parse_advisory(CompletionWriter(connection, queue, "w", "worker", ()).payload(job, result))
    assert event


def _identify(body: bytes) -> None:
    headers = {"Job-Id": decode_text(body[:200])}
    job = Delivery.of(PulledMessage("q", b"$JS.ACK.q.w.1.7.1.1.0", body, headers, "q", "w", 7, 1, 1))
    assert job.id
    job.id.encode()
    assert "\n" not in job.shown_id


def _show(data: bytes) -> None:
    text = decode_text(data)
    shown = one_line(text)
    assert shown is None or (len(shown) <= 1_000 and len(shown.splitlines()) == 1 and shown.encode())
    assert len(shown_value([text])) < 1_000
    record = logging.LogRecord("a", logging.INFO, "", 0, text, (), None)
    first, *others = TextFormatter("%(message)s").format(record).split("\n")
    assert all(line.startswith("    ") for line in others)
    assert "\x1b" not in first
    assert len(JsonFormatter().format(record).splitlines()) == 1


def _read_records(raw: bytes) -> None:
    message = _stored(raw)
    read_outline(message, "q")
    read_record(message, "q")


def _pull(reply: bytes) -> None:
    message = PulledMessage.parse(b"q.a", reply, None, b"")
    assert message.stored_at.tzinfo
    assert message.reply.encode(errors="surrogateescape") == reply


def _read_audit(data: bytes) -> None:
    message = _stored(data=data)
    parse_record(LetterRecord, message)
    parse_record(IntentRecord, message, _TIME)
    lease = _parse(message)
    str(LeaseState(lease, 1, lease.since or _NOW, _NOW))


_ADVISORY = {
    "type": "io.nats.jetstream.advisory.v1.max_deliver",
    "id": "a",
    "timestamp": _TIME,
    "stream": "q",
    "consumer": "w",
    "stream_seq": 1,
    "deliveries": 2,
    "domain": "",
}
_COMPLETION = _ADVISORY | {
    "type": "io.airflow.jetstream.v1.completion",
    "job_id": "a",
    "worker": "w",
    "result": {"a": 1},
}


def _end_of(data: bytes) -> None:
    parse_cancellation_request(data)
    end = parse_end(data, 5, "q")
    assert end is None or len(end.note.splitlines()) <= 1
    if end:
        end.note.encode()
    _read_advisory(_stored(data=data), "q", "")


@dataclass(frozen=True)
class Target:
    """A parser and the strategy of what it gets."""

    parse: Callable[[bytes], object]
    inputs: st.SearchStrategy[bytes]


_JOB_HEADERS = ("Job-Deadline", "Job-Expires", "X-Execute-At", "Job-Advisory", "Job-Id", "Redrive-Count", "traceparent")
_LETTER_HEADERS = tuple(
    f"Dead-Letter-{name}"
    for name in ("Sequence", "Stream-Created", "Subject", "Time", "Last-Failure", "Kept-Headers", "Origin", "Reason")
)
_MESSAGE = {"subject": "q.a", "seq": 7, "hdrs": "TkFUUy8xLjANCg==", "data": "YQ==", "time": _TIME}
_INFO = {"version": "2.12.0", "max_payload": 1_048_576, "tls_required": False, "nonce": "a", "connect_urls": ["a:1"]}
_FRAMES = (
    *(
        b"MSG a 1 5\r\nhello\r\n",
        b"HMSG a 1 b 12 17\r\nNATS/1.0\r\n\r\nhello\r\n",
        b"MSG ",
        b"HMSG ",
        b" 99999999999\r\n",
    ),
    *(b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'a'\r\n", b"-ERR\r\n", b"INFO ", b"INFO []\r\n", b"INFO null\r\n"),
)
_QUEUE = (
    *(b"name: q\n", b"subjects: [q.>]\n", b"consumers:\n", b"- name: w\n", b"  max_deliver: 2\n", b"storage: ", b"? "),
    *(b"a: &a [x, x]\n", b"b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n", b"&c [*c]", b"max_age: 99999999999w\n"),
)

TARGETS = {
    "headers": Target(_parse_headers, _header_lines("A", "Nats-Msg-Id", "")),
    "headers of a job": Target(_work_on, _header_lines(*_JOB_HEADERS)),
    "body of a job": Target(_identify, _changed({"id": "a", "advisory": "a.b"})),
    "reply subject of a job": Target(
        _pull, _documents(b"$JS.ACK.q.w", b"$JS.ACK.d.a.q.w", b".1", b".7", b".1795380000000000000", b".", b"\xff")
    ),
    "result of a handler": Target(_complete, _changed({"id": "a"})),
    "units": Target(_parse_units, _documents(b"1h30m", b"s", b"w", b"MB", b"T", b"Z", b".", b"2026-11-21T09:00:00Z")),
    "text for people": Target(_show, _documents(b"a", b"2026-11-21 09:00:00 INFO job ended")),
    "advisory": Target(_end_of, _changed(_ADVISORY)),
    "completion": Target(_end_of, _changed(_COMPLETION)),
    "report on an advisory subject": Target(lambda data: reported_job("a.b", data), _changed({"id": "a"})),
    "INFO": Target(lambda data: server_version(parse_server_info(data)), _changed(_INFO)),
    "frames": Target(_parse_frames, _documents(*_FRAMES)),
    "frames of the blocking connection": Target(_parse_blocking_frames, _documents(*_FRAMES)),
    "API answer": Target(lambda data: decode_answer(data, "A"), _changed({"error": {"code": 503, "err_code": 1}})),
    "stored message": Target(lambda data: parse_msg_get(data, "q"), _changed({"message": _MESSAGE, "error": {}})),
    "fields of a stored message": Target(
        lambda data: parse_msg_get(b'{"message":%b}' % data, "q"),
        _changed(_MESSAGE),
    ),
    "direct get": Target(
        lambda data: parse_direct_get(data, b""),
        _header_lines("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"),
    ),
    "PubAck": Target(lambda data: parse_publish_ack("a", data), _changed({"stream": "q", "seq": 1, "error": {}})),
    "record of a dead letter": Target(_read_records, _header_lines(*_LETTER_HEADERS)),
    "kept headers": Target(
        lambda data: parse_pairs(decode_text(data)), _documents(b'[["a", "b"]]', b'["a", "b", "c"]')
    ),
    "origin": Target(
        lambda data: parse_origin(decode_text(data)), _changed({"dag_id": "a", "run_id": "b", "task_id": "c"})
    ),
    "audit": Target(
        _read_audit,
        _changed({"operation": "redrive", "seconds": 30.0, "since": _TIME, "who": {}, "run": "a", "open_since": 1}),
    ),
    "manifest": Target(parse_manifest_record, _changed({"type": "io.airflow.jetstream.v1.published", "queue": "q"})),
    "queue file": Target(_parse_queue, _documents(*_QUEUE)),
    "sequence ranges": Target(
        lambda data: _refusal(SequenceRanges.decode, decode_text(data)),
        _documents(SequenceRanges.of([1, 2, 9]).encode().encode()),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_arrives_a_parser_ends_soon_with_a_value_or_an_error_of_the_tree(name: str) -> None:
    target = TARGETS[name]
    logging.disable(logging.CRITICAL)
    # Imports, and what is compiled at the first call.
    _measured(target.parse, b"a")
    ends = time.monotonic() + _SECONDS

    @settings(
        max_examples=50,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(target.inputs)
    def parse(data: bytes) -> None:
        seconds, size = _measured(target.parse, data)
        assert seconds < _MOST_SECONDS
        assert size < _MOST_BYTES

    try:
        parse()
        while time.monotonic() < ends:
            parse()
    finally:
        logging.disable(logging.NOTSET)


def _measured(parse: Callable[[bytes], object], data: bytes) -> tuple[float, int]:
    tracemalloc.start(1)
    began = time.monotonic()
    try:
        parse(data)
    except JetStreamProviderError as error:
        # Somebody reads it, in a log that takes UTF-8 only.
        assert len(str(error).encode()) < 4_000  # noqa: PT017
    finally:
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return time.monotonic() - began, size


@pytest.mark.parametrize("name", ["x" * 8_000, "é" * 3_859, "a\n" * 4_000])
@pytest.mark.parametrize(
    "parse", [lambda values: WorkQueue(**{"name": "q", "subjects": ["a"], **values}), Selection.of]
)
def test_an_error_cuts_the_name_of_an_unknown_field(parse: Callable[[dict[str, Any]], object], name: str) -> None:
    with pytest.raises((JetStreamProviderError, ValueError)) as refused:
        parse({name: 1})
    assert len(str(refused.value).encode()) < 4_000
