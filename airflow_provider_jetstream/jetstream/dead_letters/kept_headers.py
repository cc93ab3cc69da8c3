"""The headers of a job that can't stand among those of its record, as JSON in one header."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.headers import ExactValue, exact_pair, is_servers
from airflow_provider_jetstream.jetstream.client.wire_text import is_encodable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.headers import Pairs

# Clients refuse other names, and change values with line breaks in them or white space around them.
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_WITH_LINE = 3


def needs_json(name: str, value: str) -> bool:
    """Return whether the server would act on a header, or a client read it as another one."""
    if is_servers(name) or not _NAME.fullmatch(name) or isinstance(value, ExactValue):
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return value != value.strip() or bool({"\r", "\n"} & set(value))


def format_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Format headers as a list of ``[name, value]``, or ``[name, value, line]`` where the line has another form."""
    return json.dumps(
        [[name, value, value.line] if isinstance(value, ExactValue) else [name, value] for name, value in pairs]
    )


def parse_pairs(text: str | None) -> Pairs:
    """Parse what :func:`format_pairs` has formatted; nothing where it is anything else."""
    if not text:
        return ()
    try:
        pairs = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        return ()
    return tuple(exact_pair(*pair) if len(pair) == _WITH_LINE else (pair[0], pair[1]) for pair in pairs)


def _is_pair(value: object) -> bool:
    match value:
        case [str(), str()]:
            return True
        case [str(), str(), str(line)]:
            return is_encodable(line)
    return False
