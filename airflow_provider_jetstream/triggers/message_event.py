"""The event of one message, and which events the mode ``payload`` makes.

An event is JSON that every database of Airflow stores, whatever the message contains.

A triggerer that gets an event that isn't JSON ends, with all of its triggers; the message would come back and end the
next one.
"""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self, TypeAlias, get_args

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.limits import SHOWN_VALUE
from airflow_provider_jetstream.jetstream.publishing.job import delivered_job_id
from airflow_provider_jetstream.jetstream.units import parse_seconds, parse_size
from airflow_provider_jetstream.worker.errors import InvalidBodyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.worker.delivery import PulledMessage

BodyForm: TypeAlias = Literal["text", "json"]

# Airflow's own models, and the databases, follow each level with a call.
MOST_LEVELS: Final = 32
_OF_64_BITS: Final = range(-(2**63), 2**63)
_MOST_IN_A_BATCH = 10_000
_LONGEST_WAIT = 300.0


@dataclass(frozen=True, slots=True)
class PayloadOptions:
    """How messages become events in the mode ``payload``.

    :param batch_size: how many messages are requested at once
    :param max_wait: how long a request for messages waits for them, in seconds or as text; a message is passed on at
        once, and whether there are more is asked again after this time
    :param body: ``text`` passes every body on, as UTF-8 or else as Base64; ``json`` passes on the value of a body that
        is JSON, and any other message becomes a dead letter
    :param max_size: the largest message, headers included, that an event contains, in bytes or as text; of a larger one
        the event says where the queue's archive has it, and without a copy there it becomes a dead letter
    """

    batch_size: int = 100
    max_wait: float = 5.0
    body: BodyForm = "text"
    max_size: int = 64 << 10

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Check arguments.

        :raises ArgumentError: one isn't known, or can't be used
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(values.keys() - set(names)):
            raise ArgumentError(
                f"expected arguments among {', '.join(names)} for the mode payload, found {', '.join(unknown)}:"
                " remove or correct them"
            )
        try:
            options = cls(
                **{
                    **values,
                    "max_wait": parse_seconds(values.get("max_wait", cls().max_wait)),
                    "max_size": parse_size(values.get("max_size", cls().max_size)),
                }
            )
        except ValueError as error:
            raise ArgumentError(f"max_wait or max_size of the mode payload: {error}") from None
        batch, size = options.batch_size, options.max_size
        if not isinstance(batch, int) or isinstance(batch, bool) or not 0 < batch <= _MOST_IN_A_BATCH:
            raise ArgumentError(f"expected 1 to {_MOST_IN_A_BATCH} as batch_size, found {batch!r}: correct it")
        if not 0 < options.max_wait <= _LONGEST_WAIT:
            raise ArgumentError(
                f"expected more than 0 and at most {_LONGEST_WAIT:g} seconds as max_wait, found {options.max_wait:g}:"
                " correct it"
            )
        if size < 1:
            raise ArgumentError(f"expected at least 1 byte as max_size, found {size}: events have no unlimited size")
        if options.body not in get_args(BodyForm):
            raise ArgumentError(f"expected {' or '.join(get_args(BodyForm))} as body, found {options.body!r}")
        return options

    def as_json(self) -> dict[str, Any]:
        """Return the arguments."""
        return asdict(self)


def message_event(
    message: PulledMessage, form: BodyForm, size: int, stored: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a message as the payload of an event.

    ``encoding`` says what ``body`` is: ``utf-8`` and ``base64`` for text, ``json`` for any JSON value, and ``stored``
    for ``null``, where ``stored`` names the stream and the sequence from which the whole message can be read.

    :param size: :func:`message_size`, also where the body isn't there any more
    :param form: ``json`` where the body has to be JSON
    :param stored: stream and sequence of a copy, for a message that is too large for an event
    :raises InvalidBodyError: the body isn't JSON, or not such that every database stores it
    """
    event: dict[str, Any] = {
        "stream": message.stream,
        "sequence": message.sequence,
        "stored_at": message.stored_at.isoformat(),
        "consumer": message.consumer,
        "attempt": message.attempt,
        "subject": _storable(message.subject),
        "job_id": _storable(delivered_job_id(message.headers, message.data, message.sequence)),
        "size": size,
    }
    if stored is not None:
        event["job_id"] = event["job_id"][:SHOWN_VALUE]
        return event | {"headers": {}, "encoding": "stored", "body": None, "stored": dict(stored)}
    headers = {_storable(name): _storable(value) for name, value in message.headers.items()}
    encoding, body = ("json", _parse(message.data)) if form == "json" else _text(message.data)
    return event | {"headers": headers, "encoding": encoding, "body": body}


def message_size(message: PulledMessage) -> int:
    """Return the bytes of a message's body and headers."""
    return len(message.data) + sum(len(name) + len(value) for name, value in message.headers.items())


def _text(data: bytes) -> tuple[str, str]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    # PostgreSQL stores no NUL.
    return ("base64", b64encode(data).decode()) if "\0" in text else ("utf-8", text)


def _parse(data: bytes) -> Any:
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidBodyError(f"expected JSON, found {len(data)} bytes that are none: {_shown(error)}") from None
    _check(value)
    return value


def _check(value: Any) -> None:
    """Refuse what JSON can write and a database can't store; without recursion."""
    level, values = 0, [value]
    while values:
        inner: list[Any] = []
        for item in values:
            if isinstance(item, dict | list) and level == MOST_LEVELS:
                raise _too_deep()
            if isinstance(item, dict):
                inner += (*item.keys(), *item.values())
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str):
                if _storable(item) != item:
                    raise InvalidBodyError("expected text, found a NUL or half of a surrogate pair: send none")
            elif isinstance(item, float) and item - item != 0:
                raise InvalidBodyError("expected finite numbers, found one that is larger than any: send it as text")
            elif isinstance(item, int) and item not in _OF_64_BITS:
                raise InvalidBodyError("expected numbers of 64 bits, found a larger one: send it as text")
        level, values = level + 1, inner


def _storable(text: str) -> str:
    return readable_text(text).replace("\0", "\ufffd")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _too_deep() -> InvalidBodyError:
    return InvalidBodyError(f"expected at most {MOST_LEVELS} levels of lists and objects, found more: send fewer")


def _shown(error: ValueError) -> str:
    return str(error)[:SHOWN_VALUE]
