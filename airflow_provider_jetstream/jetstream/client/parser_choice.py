"""Chooses the parser of nats-py's client: this package's, or nats-py's own where its internals differ.

This package's parser extends one that nats-py doesn't document. With nats-py's own, messages that are subscribed to
raw go through nats-py's queue and task like all others: slower, and with nats-py's own rules for odd subjects.
"""

from __future__ import annotations

import inspect
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from nats.protocol.parser import Parser

from airflow_provider_jetstream.jetstream.client.wire_text import encode_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage
    from airflow_provider_jetstream.jetstream.client.frame_parser import FrameParser

log = logging.getLogger(__name__)

# What the parser calls of the client, with the names of the arguments.
_CALLED: Final = {
    "_process_msg": ("sid", "subject", "reply", "data", "headers"),
    "_process_ping": (),
    "_process_pong": (),
    "_process_err": ("err_msg",),
    "_process_info": ("info", "initial_connection"),
}


def create_frame_parser(client: Client) -> FrameParser | None:
    """Return this package's parser for a client; ``None`` where nats-py's own has to be used."""
    try:
        # Its module needs names of nats-py's that another version may lack.
        from airflow_provider_jetstream.jetstream.client.frame_parser import FrameParser
    except ImportError as error:
        _report(str(error))
        return None
    if difference := _difference(client):
        _report(difference)
        return None
    return FrameParser(client)


def _difference(client: Client) -> str:
    """Return what of nats-py isn't as the parser expects it; empty where all is."""
    parser = Parser(client)
    if tuple(inspect.signature(parser.parse).parameters) != ("data",):
        return f"Parser.parse{inspect.signature(parser.parse)}"
    if not isinstance(getattr(parser, "buf", None), bytearray) or not hasattr(parser, "state"):
        return "Parser.buf, Parser.state"
    if not isinstance(getattr(client, "_ps", None), Parser):
        return "Client._ps"
    for name, expected in _CALLED.items():
        method = getattr(client, name, None)
        if method is None or tuple(inspect.signature(method).parameters) != expected:
            return f"Client.{name}"
    return ""


@lru_cache
def _report(difference: str) -> None:
    """Log once a process what differs."""
    log.warning(
        "This nats-py isn't as expected (%s), so its own parser is used, which is slower: install a version that this"
        " package supports",
        difference,
    )


class RawHeaders(dict[str, str]):
    """The headers of a message.

    :param raw: as they are on the wire
    """

    def __init__(self, raw: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self.raw = raw


def raw_callback(on_message: OnMessage) -> Callable[[Msg], Awaitable[None]]:
    """Return a callback for nats-py's client that passes messages on as this package's parser does."""

    async def receive(message: Msg) -> None:
        headers = message.headers.raw if isinstance(message.headers, RawHeaders) else None
        on_message(encode_text(message.subject), encode_text(message.reply), headers, message.data)

    return receive
