"""What counts as evidence about jobs: for each kind its subject, who may write it, and which body it must have.

A client chooses the reply subject of what it sends, and nats-server applies no permission to that subject. So the
server's own answers can be stored on any subject that a stream captures: PubAcks, the empty answers to
acknowledgements and to the messages of an atomic batch, errors, the answers of its API and statuses of pull requests.
None of them is evidence. So no message proves anything by its subject alone: each reader judges it by this table, and
what a body states has to agree with the subject, since permissions are for subjects.

Protocol: PubAcks and answers in "JetStream API Reference" of the NATS documentation; ``Nats-Scheduler`` in NATS ADR-51,
``Nats-Stream`` in ADR-31.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from airflow_provider_jetstream.jetstream.advisories import (
    AckMetric,
    AnyAdvisory,
    Cancelled,
    Completion,
    MaxDeliveries,
    Nak,
    ReportedAttempt,
    Terminated,
    parse_advisory,
    parse_attempt,
    parse_cancellation_request,
)
from airflow_provider_jetstream.jetstream.contract import NO_CONSUMER, id_token
from airflow_provider_jetstream.jetstream.limits import SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# The server adds the first to each message that it makes of a schedule, the second to each that it copies: to a copy
# by ``republish``, and to the answer to a direct get, whose subject a client chooses.
_SCHEDULER: Final = "Nats-Scheduler"
_COPIED: Final = "Nats-Stream"
_COPIED_SUBJECT: Final = "Nats-Subject"
_RECORD: Final = "Dead-Letter-"
_OWN_TYPES: Final = "io.airflow.jetstream."
_HANDLED_TYPE: Final = "io.airflow.jetstream.v1.handled"
# The fields of PubAcks and refusals; of answers of the server about itself.
_PUB_ACK: Final = frozenset({"error", "stream", "seq", "domain", "duplicate", "val", "batch", "count"})
_OF_SERVER: Final = frozenset({"server", "data"})
_DIGITS: Final = 20


class Message(Protocol):
    """A stored message, as far as it is judged."""

    @property
    def subject(self) -> str:
        """Its subject."""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Name and value in order."""

    @property
    def data(self) -> bytes:
        """Its body."""


# By name: the tokens of a subject that stand for something.
_Names: TypeAlias = "Mapping[str, str]"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A kind of evidence.

    :param subject: its subjects: ``<name>`` is a token, ``<name…>`` the rest
    :param stream: the companion that stores it
    :param writers: who may publish on its subjects
    :param body: what it has to be, as text
    :param is_valid: returns whether a message is it; gets the tokens of the subject by name
    """

    subject: str
    stream: str
    writers: str
    body: str
    is_valid: Callable[[Message, _Names], bool]

    def names(self, tokens: list[str]) -> dict[str, str] | None:
        """Return the tokens of a subject by name; ``None`` where it isn't one of this kind."""
        names: dict[str, str] = {}
        pattern = self.subject.split(".")
        for position, part in enumerate(pattern):
            if position >= len(tokens):
                return None
            if part.endswith("…>"):
                names[part[1:-2]] = ".".join(tokens[position:])
                return names
            if part.startswith("<"):
                names[part[1:-1]] = tokens[position]
            elif part != tokens[position]:
                return None
        return names if len(tokens) == len(pattern) else None


def proves_nothing(message: Message) -> bool:
    """Return whether a message isn't what its subject is for; of a subject that the table hasn't, whether it is empty.

    Readers of one kind of evidence get its content by a function of its own, which asks the same.
    """
    row, names = _row_of(message.subject)
    if _is_copied(message) != (row is not None and row.is_valid is _is_copy):
        return True
    if message.headers and any(name == _SCHEDULER for name, _ in message.headers):
        return True
    return not (row.is_valid(message, names) if row else _is_content(message, names))


def event_of(message: Message, queue: str, domain: str = "") -> AnyAdvisory | None:
    """Return what a message of the events stream or the dead letter queue tells about a job; ``None`` for any other.

    :param queue: the work queue
    :param domain: the JetStream domain of its server; empty where it has none
    """
    row, names = _row_of(message.subject)
    types = _EVENTS.get(row.subject) if row else None
    if types is None or names["queue"] != queue or (message.headers and _is_from_elsewhere(message)):
        return None
    return _event(message, names, types, domain)


def event_of_body(subject: str, data: bytes, queue: str, domain: str = "") -> AnyAdvisory | None:
    """Return what a body on a subject tells, as :func:`event_of` does; of a message whose headers were judged."""
    return event_of(_Bare(subject, data), queue, domain)


def attempt_of(message: Message, queue: str) -> ReportedAttempt | None:
    """Return what a message says of an attempt at a job of a queue; ``None`` for any other message."""
    row, names = _row_of(message.subject)
    if row is None or row.is_valid is not _is_attempt or names["queue"] != queue or proves_nothing(message):
        return None
    return parse_attempt(message.data)


def handled_sequence(message: Message, queue: str) -> int:
    """Return the stream sequence of the dead letter that a handler reports as handled; 0 for any other message."""
    row, names = _row_of(message.subject)
    if row is None or row.is_valid is not _is_report or names["queue"] != queue or proves_nothing(message):
        return 0
    return int(names["sequence"])


def is_from_elsewhere(names: Iterable[str]) -> bool:
    """Return whether headers are those of an answer to a direct get, or of what the server made of a schedule."""
    return not {_COPIED, _SCHEDULER}.isdisjoint(names)


@dataclass(frozen=True, slots=True)
class _Bare:
    subject: str
    data: bytes
    headers: tuple[tuple[str, str], ...] = ()


def _row_of(subject: str) -> tuple[Evidence | None, dict[str, str]]:
    tokens = subject.split(".")
    for row in _ROWS.get(_place(tokens), ()):
        if (names := row.names(tokens)) is not None:
            return row, names
    return None, {}


def _place(tokens: list[str]) -> tuple[str, ...]:
    """Return what tells rows apart before their tokens are compared."""
    if tokens[0] == "audit":
        return tuple(tokens[:1] + tokens[2:3])
    return tuple(tokens[4:5] if tokens[0] == "$JS" else tokens[:1])


def _is_copied(message: Message) -> bool:
    return bool(message.headers) and any(name == _COPIED for name, _ in message.headers)


def _is_from_elsewhere(message: Message) -> bool:
    return is_from_elsewhere(name for name, _ in message.headers)


def _event(message: Message, names: _Names, types: tuple[type, ...], domain: str | None = None) -> AnyAdvisory | None:
    event = parse_advisory(message.data)
    if event is None or not isinstance(event, types):
        return None
    if (event.stream, event.consumer) != (names["queue"], names["consumer"]):
        return None
    if names.get("sequence", str(event.stream_seq)) != str(event.stream_seq):
        return None
    # What workers publish names no domain.
    is_of_worker = isinstance(event, Completion | Cancelled)
    return event if is_of_worker or domain is None or event.is_of_server(names["queue"], domain) else None


def _is_event(*types: type) -> Callable[[Message, _Names], bool]:
    def is_valid(message: Message, names: _Names) -> bool:
        return _event(message, names, types) is not None

    return is_valid


def _is_content(message: Message, _: _Names) -> bool:
    """Return whether a body is neither empty nor an answer of the server."""
    if not message.data or not message.data.startswith(b"{"):
        return bool(message.data)
    value = _json(message.data)
    return value is None or not _is_answer(value)


def _is_report(message: Message, names: _Names) -> bool:
    value = _json(message.data)
    if value is None or _is_answer(value) or not 0 < _whole(names["sequence"]) <= SEQUENCE:
        return False
    return bool(value.get("type", _HANDLED_TYPE) == _HANDLED_TYPE)


def _is_cancellation(message: Message, names: _Names) -> bool:
    request = parse_cancellation_request(message.data)
    if request is None or request.stream != names["queue"]:
        return False
    token = id_token(request.job_id) if request.stream_seq is None else str(request.stream_seq)
    return token == names["token"]


def _is_attempt(message: Message, names: _Names) -> bool:
    attempt = parse_attempt(message.data)
    if attempt is None:
        return False
    stated = (attempt.stream, attempt.consumer, str(attempt.stream_seq), str(attempt.deliveries))
    # Its type may be left out of no message: an answer of the server has others.
    return stated == (names["queue"], names["consumer"], names["sequence"], names["delivery"]) and _has_type(message)


def _has_type(message: Message) -> bool:
    return "type" in (_json(message.data) or {})


def _is_record(message: Message, names: _Names) -> bool:
    """Return whether a message has the headers of a dead letter's record, which agree with its subject."""
    fields = {name: value for name, value in message.headers if name.startswith(_RECORD)}
    if not fields or fields.get(f"{_RECORD}Stream", names["queue"]) != names["queue"]:
        return False
    consumer = names.get("consumer", NO_CONSUMER)
    if fields.get(f"{_RECORD}Consumer", consumer) != consumer and consumer != NO_CONSUMER:
        return False
    stated, named = fields.get(f"{_RECORD}Sequence"), names.get("sequence")
    return bool(stated or named) and (stated is None or named is None or _whole(stated) == _whole(named) > 0)


def _is_copy(message: Message, names: _Names) -> bool:
    """Return whether a message is the server's copy of one of the subject that its own subject ends in."""
    added = [value for name, value in message.headers if name == _COPIED_SUBJECT]
    return bool(added) and added[-1] == names["subject"]


def _is_object(*fields: str, **agreeing: str) -> Callable[[Message, _Names], bool]:
    """Return a rule: the body is a JSON object with some fields, of which others agree with tokens of the subject.

    :param agreeing: by field the name of the token
    """
    needed = frozenset({*fields, *agreeing})

    def is_valid(message: Message, names: _Names) -> bool:
        value = _json(message.data)
        if value is None or not needed <= value.keys() or _is_answer(value):
            return False
        return all(str(value[field]) == names[token] for field, token in agreeing.items())

    return is_valid


def _json(data: bytes) -> dict[str, Any] | None:
    if not data.startswith(b"{"):
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_answer(value: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is an answer of the server, or of a service of the account."""
    if not value:
        return False
    kind = value.get("type", _OWN_TYPES)
    return value.keys() <= _PUB_ACK or value.keys() <= _OF_SERVER or not str(kind).startswith(_OWN_TYPES)


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else 0


_WORKERS = "workers of the consumer"
_SERVER = "the server"
_REDRIVERS = "redrivers"
_PUBLISHERS = "publishers and redrivers"
_COMPLETED = "completed.<queue>.<consumer>.<sequence>"
_ADVISORY = "$JS.EVENT.ADVISORY.CONSUMER"
_METRIC = "$JS.EVENT.METRIC.CONSUMER.ACK.<queue>.<consumer>"
_EVENTS: Final[dict[str, tuple[type, ...]]] = {
    _COMPLETED: (Completion, Cancelled),
    _METRIC: (AckMetric,),
    f"{_ADVISORY}.MAX_DELIVERIES.<queue>.<consumer>": (MaxDeliveries,),
    f"{_ADVISORY}.MSG_TERMINATED.<queue>.<consumer>": (Terminated,),
    f"{_ADVISORY}.MSG_NAKED.<queue>.<consumer>": (Nak,),
}

TABLE: Final[tuple[Evidence, ...]] = (
    Evidence(
        _COMPLETED,
        "events",
        _WORKERS,
        "a completion or a cancelled end; `stream`, `consumer` and `stream_seq` as in the subject",
        _is_event(Completion, Cancelled),
    ),
    *(
        Evidence(
            subject,
            "events" if types == (AckMetric,) else "dead letter queue",
            _SERVER,
            "the server's event of that kind; `stream` and `consumer` as in the subject, its own domain",
            _is_event(*types),
        )
        for subject, types in _EVENTS.items()
        if subject != _COMPLETED
    ),
    Evidence(
        "cancelled.<queue>.<token>",
        "events",
        "nobody by role: who may cancel",
        "a cancellation; `stream` as in the subject, whose token is `stream_seq`, or else the SHA-256 of `job_id`",
        _is_cancellation,
    ),
    Evidence(
        "attempts.<queue>.<consumer>.<sequence>.<delivery>",
        "attempts",
        f"{_WORKERS}; {_REDRIVERS}: who asked for a retry",
        "an attempt; `stream`, `consumer`, `stream_seq` and `deliveries` as in the subject. It decides only whether a"
        " job may be retried or given up while it waits",
        _is_attempt,
    ),
    Evidence(
        "published.<queue>.<key>",
        "events",
        _PUBLISHERS,
        "a manifest's record, with the key that its names give, or a part: neither empty nor an answer",
        _is_content,
    ),
    *(
        Evidence(
            subject,
            "dead letter queue",
            writers,
            "the job's, any; at least one header `Dead-Letter-…`, and those that name stream, consumer and sequence"
            " as in the subject",
            _is_record,
        )
        for subject, writers in (
            (f"dead.<queue>.{NO_CONSUMER}.<sequence>", f"{_REDRIVERS}: the death is proved"),
            ("dead.<queue>.<consumer>.<sequence>", f"{_WORKERS}: counts if that had the job"),
            ("dead.<queue>.<consumer>", f"{_WORKERS}: counts if that had the job"),
            ("parked.<queue>.<consumer>.<sequence>", _REDRIVERS),
        )
    ),
    Evidence(
        "entries.<queue>.<subject…>",
        "audit",
        _SERVER,
        "any; the headers that the server adds to a copy, with the subject that this one ends in",
        _is_copy,
    ),
    Evidence("archive.<queue>.<subject…>", "archive", _SERVER, "as of `entries.…`", _is_copy),
    Evidence(
        "handled.<queue>.<sequence>",
        "audit",
        "nobody by role: handlers of dead letters",
        'a JSON object, such as `{"by": "ann"}`, that is no answer of the server; if it has a `type`, then'
        f" `{_HANDLED_TYPE}`",
        _is_report,
    ),
    *(
        Evidence(f"audit.<queue>.{subject}", "audit", writers, f"a JSON object with {what}", rule)
        for subject, writers, what, rule in (
            (
                "letters.<sequence>",
                _REDRIVERS,
                "`action`, and `stream` and `sequence` as in the subject",
                _is_object("action", "created", stream="queue", sequence="sequence"),
            ),
            (
                "intents.<operation>",
                _REDRIVERS,
                "`letters`, `target`, and `stream` and `operation` as in the subject",
                _is_object("letters", "target", stream="queue", operation="operation"),
            ),
            (
                "account",
                "whoever makes an account",
                "`created`, and `stream` as in the subject",
                _is_object("created", stream="queue"),
            ),
            ("lease", _REDRIVERS, "`operation` and `seconds`", _is_object("operation", "seconds")),
            ("lease-renewal", _REDRIVERS, "`token`", _is_object("token")),
            ("runs.<run>", _REDRIVERS, "`stream` and `run` as in the subject", _is_object(stream="queue", run="run")),
            (
                "redrives.<id>",
                _REDRIVERS,
                "`stream` and `id` as in the subject",
                _is_object("created", stream="queue", id="id"),
            ),
            ("redrive-controls.<id>", "monitors, redrivers", "`action`", _is_object("action")),
            (
                "ordered.<digest>",
                _REDRIVERS,
                "`key`, and `stream` as in the subject",
                _is_object("key", stream="queue"),
            ),
        )
    ),
)

_ROWS: Final[dict[tuple[str, ...], list[Evidence]]] = {}
for _row in TABLE:
    _ROWS.setdefault(_place(_row.subject.split(".")), []).append(_row)
