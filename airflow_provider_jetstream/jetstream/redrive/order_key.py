"""The key of a letter: letters of one key come back in order, those of different keys beside each other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.headers import first

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter

_HEADER: Final = "header"
_SUBJECT: Final = "subject"
_BODY: Final = "body"
_MOST_DIGITS = 3


def order_key_problem(order_key: object) -> str:
    """Return a sentence that says why a text doesn't say where letters state their key; empty if it does."""
    if isinstance(order_key, str):
        kind, _, name = order_key.partition(":")
        if name and (kind in (_HEADER, _BODY) or (kind == _SUBJECT and _is_number(name))):
            return ""
    return (
        "expected header:<name>, subject:<number of the token, from 1> or body:<field> as order_key, found"
        f" {order_key!r}"
    )


def key_of(letter: DeadLetter, order_key: str) -> str | None:
    """Return the key that a letter states; ``None`` where it states none.

    :param order_key: where it states its key
    """
    kind, _, name = order_key.partition(":")
    if kind == _HEADER:
        return first(letter.headers, name) or None
    if kind == _BODY:
        return _field(letter.body, name)
    tokens = letter.subject.split(".")
    return tokens[int(name) - 1] if int(name) <= len(tokens) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < len(text) <= _MOST_DIGITS and int(text) > 0


def _field(body: bytes, name: str) -> str | None:
    """Return a field of a body that is a JSON object: text or a whole number, ``None`` for anything else."""
    try:
        value = json.loads(body)
        value = value.get(name) if isinstance(value, dict) else None
        # The number 7 and the text "7" are one key, as in most programs that take either.
        return str(value) or None if isinstance(value, str | int) and not isinstance(value, bool) else None
    except (ValueError, RecursionError):
        return None
