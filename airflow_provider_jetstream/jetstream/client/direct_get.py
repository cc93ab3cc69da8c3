"""Direct gets: which streams answer them exactly, and what their answers say.

Protocol: ADR-31, "JetStream Direct Get".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.message import StoredMessage, parse_headers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# The API level from which on one request may have many answers.
BATCHES: Final = 1
# Where the status stands in the first line of headers.
STATUS: Final = slice(9, 12)

# What the server adds to a message's headers, behind its own ones; those may have the same names.
_ADDED = b"Nats-Stream: "
_TOLD = re.compile(
    rb"Nats-Stream: [^\r]*\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d+)\r\nNats-Time-Stamp: ([^\r]*)\r\n"
)
_FIRST_LINE = len(b"NATS/1.0\r\n")


def exact_streams(configs: Iterable[Mapping[str, Any]], wanted: Collection[str]) -> set[str]:
    """Choose the streams whose direct gets are as exact as the API's.

    With replicas any of them may answer, and be behind; so may a mirror that answers for its origin.

    :param configs: of all streams of the account
    :param wanted: names of streams
    :return: those of them
    """
    found = list(configs)
    mirrored = {each["mirror"]["name"] for each in found if each.get("mirror") and each.get("mirror_direct")}
    return {
        each["name"]
        for each in found
        if each["name"] in wanted
        and each["name"] not in mirrored
        and each.get("allow_direct")
        and each["num_replicas"] == 1
        and not each.get("mirror")
    }


def stored_message(header: bytes, body: bytes) -> StoredMessage | None:
    """Read an answer.

    :param header: its headers as they are on the wire
    :param body: its body
    :return: the message; ``None`` where the server doesn't say which one it is
    """
    at = header.rfind(_ADDED)
    if at < 0 or not (told := _TOLD.match(header, at)):
        return None
    subject, sequence, time = told.groups()
    own = parse_headers(header[:at]) if at > _FIRST_LINE else ()
    return StoredMessage(subject.decode("utf-8", "surrogateescape"), int(sequence), time.decode(), own, body)
