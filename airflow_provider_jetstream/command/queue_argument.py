"""The queue that a command is about: the YAML file of its declaration, or the name of its stream."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.command.connection_options import settings_of
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.line_text import shown_value

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.command.output import Output
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_NAME = re.compile(r"[^\s.*>/\\]{1,255}")
_FILES = (".yaml", ".yml", ".json")


def add_queue_argument(parser: argparse.ArgumentParser, *, only_file: bool = False, several: bool = False) -> None:
    """Add the argument for the queue.

    :param only_file: whether it has to be a file
    :param several: whether there may be several
    """
    text = "path of the queue's YAML file" if only_file else "path of the queue's YAML file, or its stream's name"
    parser.add_argument("queue", metavar="FILE" if only_file else "QUEUE", nargs="+" if several else None, help=text)


@asynccontextmanager
async def opened(options: argparse.Namespace, out: Output) -> AsyncIterator[NatsPyConnection]:
    """Open the connection that the options describe."""
    from airflow_provider_jetstream.jetstream.client.connect import connect

    async with connect(settings_of(options, out)) as connection:
        yield connection


async def read_queue(connection: Connection, text: str) -> WorkQueue:
    """Return the queue that an argument names; a stream's declaration is made of what the server says."""
    from airflow_provider_jetstream.jetstream.queue.discovery import known_queue

    return load_file(text) if is_file(text) else await known_queue(connection, stream_name(text))


def load_file(text: str) -> WorkQueue:
    """Return the queue that a YAML file declares."""
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

    return WorkQueue.load(text)


def is_file(text: str) -> bool:
    """Return whether an argument names a file rather than a stream, whose name has neither dots nor slashes."""
    return text.endswith(_FILES) or "/" in text or (Path(text).is_file() and "." in text)


def stream_name(text: str) -> str:
    """Return the name of the stream that an argument names, without asking a server."""
    if is_file(text):
        return load_file(text).name
    # Anything else would be a part of the subjects of requests.
    if not text.isprintable() or not _NAME.fullmatch(text):
        raise ArgumentError(f"expected a stream's name or the path of a YAML file, found {shown_value(text)}")
    return text
