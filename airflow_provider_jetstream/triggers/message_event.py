"""The event of one message: JSON that every database of Airflow stores, whatever the message contains.

A triggerer that gets an event that isn't JSON ends, with all of its triggers; the message would come back and end the
next one.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.jetstream.limits import SHOWN_VALUE
from airflow_provider_jetstream.jetstream.publishing.job_identity import delivered_job_id
from airflow_provider_jetstream.worker.errors import InvalidBodyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.worker.pulled_message import PulledMessage

BodyForm: TypeAlias = Literal["text", "json"]

# Airflow's own models, and the databases, follow each level with a call.
MOST_LEVELS: Final = 32
_OF_64_BITS: Final = range(-(2**63), 2**63)


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
