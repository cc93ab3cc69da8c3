"""The options that several commands share, and what is made of them: server, queue, selection, numbers."""

from __future__ import annotations

import argparse
import getpass
import os
import re
import socket
import sys
from contextlib import asynccontextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.settings import (
    ConnectionSettings,
    read_context,
    read_environment,
    split_servers,
)
from airflow_provider_jetstream.jetstream.dead_letters.death import Reason
from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.limits import SEQUENCE
from airflow_provider_jetstream.jetstream.line_text import shown_value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow_provider_jetstream.command.output import Output
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch


# Each field of the settings with its help; a secret itself comes by a file or the environment.
_FIELDS: Final = {
    "user": "the user's name",
    "password_file": "path of the file with the user's password",
    "token_file": "path of the file with the token",
    "nkey_seed_file": "path of the file with the seed of the user's nkey",
    "credentials_file": "path of the credentials file (.creds)",
    "tls_ca_file": "path of the certificate authorities",
    "tls_cert_file": "path of the client's certificate",
    "tls_key_file": "path of the certificate's key",
    "tls_server_name": "the name in the server's certificate",
    "js_domain": "the JetStream domain",
    "api_prefix": "what the subjects of JetStream's API begin with",
    "inbox_prefix": "what the subjects begin with on which answers arrive",
    "timeout": "seconds within which the connection has to be usable; 10 where absent",
}
_SECRETS: Final = {"password": "the user's password", "token": "the token"}
_IDENTITY: Final = frozenset(
    {"user", "nkey_seed_secret", "credentials_secret", "nkey_seed_file", "credentials_file"}
    | {f"{secret}{suffix}" for secret in _SECRETS for suffix in ("", "_file")}
)

_MAX_PORT = 65_535
_NAME = re.compile(r"[^\s.*>/\\]{1,255}")
_FILES = (".yaml", ".yml", ".json")
_LONGEST_NAME = 200
# Each text field of a selection with its option's help.
_TEXTS: Final = {
    "consumer": "that this consumer delivered",
    "subject": "on this subject, or filter",
    "error_class": "of this error",
    "fingerprint": "of this fingerprint, which letters of the same text share",
    "traceback_digest": "of this digest, which letters of the same place in the code share",
    "dag_id": "that this DAG published",
    "run_id": "that this run published",
    "task_id": "that this task published",
    "older_than": 'dead for at least this long, such as "2h"',
    "younger_than": "dead for less than this",
}
_MOST_SEQUENCES = 1_000_000
_STANDARD_INPUT = "-"
# Longer text is refused anyway.
_MOST_BYTES = 1 << 20


def connection_options() -> argparse.ArgumentParser:
    """Return a parser with the options, for the sub-commands that need a server."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group(
        "connection",
        "Where no option is given: NATS_URL, NATS_USER, NATS_PASSWORD_FILE… and the context that NATS_CONTEXT names.",
    )
    group.add_argument("--server", metavar="URL", help="several with commas between them, such as nats://127.0.0.1")
    group.add_argument(
        "--context", metavar="NAME", help="a context of the command nats; the environment isn't read then"
    )
    for field, text in (
        _FIELDS
        | {
            name: f"{what}; everybody on this machine can see it there: prefer the file"
            for name, what in _SECRETS.items()
        }
    ).items():
        group.add_argument(f"--{field.replace('_', '-')}", metavar="VALUE", dest=f"nats_{field}", help=text)
    group.add_argument(
        "--tls-handshake-first",
        action="store_true",
        dest="nats_tls_handshake_first",
        help="begin with TLS, as a server with handshake_first wants it",
    )
    return parser


def settings_of(options: argparse.Namespace, out: Output) -> ConnectionSettings:
    """Return the settings; an option counts before the environment and the context.

    :raises ConnectionSettingsError: they contradict each other
    """
    given: dict[str, Any] = {
        name.removeprefix("nats_"): value
        for name, value in vars(options).items()
        if name.startswith("nats_") and value not in (None, False)
    }
    if options.server:
        given["servers"] = split_servers(options.server)
    for secret in sorted(_SECRETS.keys() & given.keys()):
        out.note(
            f"warning: --{secret} is in the list of processes and in the shell's history; give --{secret}-file, or"
            f" NATS_{secret.upper()} in the environment"
        )
    known = read_context(options.context, os.environ) if options.context else read_environment(os.environ)
    if _IDENTITY & given.keys():
        known = {name: value for name, value in known.items() if name not in _IDENTITY}
    return ConnectionSettings(**{"name": "jetstream-queue"} | known | given)


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1, as large as a stream sequence at most."""
    digits = len(str(SEQUENCE))
    if not (text.isascii() and text.isdecimal() and len(text) <= digits and 1 <= int(text) <= SEQUENCE):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def port(text: str) -> int:
    """Parse a TCP port; 0 means any."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_PORT)) and int(text) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"expected a port from 0 (any) to {_MAX_PORT}, found {text!r}")
    return int(text)


def output_options() -> argparse.ArgumentParser:
    """Return a parser with the options."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print results, and errors, as JSON")
    return parser


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


def requester() -> dict[str, str]:
    """Return the person's name on this machine, and the machine's."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return {"user": user, "host": socket.gethostname(), "by": "jetstream-queue"}


def requester_name() -> str:
    """Return who asks for something, in a few words."""
    who = requester()
    return f"{who['user']}@{who['host']}"[:_LONGEST_NAME]


def selection_options() -> argparse.ArgumentParser:
    """Return a parser with the options; a letter is selected if it matches all that are given."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("selection", "All dead letters in circulation where no option is given.")
    add_sequences_option(group)
    group.add_argument(
        "--reason",
        action="append",
        choices=[reason.value for reason in Reason],
        dest="select_reasons",
        help="dead for this reason; may be given several times",
    )
    for field, text in _TEXTS.items():
        group.add_argument(f"--{field.replace('_', '-')}", metavar="VALUE", dest=f"select_{field}", help=text)
    group.add_argument(
        "--parked", action="store_true", dest="select_parked", help="out of circulation rather than in it"
    )
    return parser


def add_sequences_option(parser: argparse._ActionsContainer) -> None:
    """Add the option by which letters are named."""
    parser.add_argument(
        "--sequence",
        action="append",
        type=_sequences,
        dest="select_sequences",
        metavar="N[-M]",
        help="of this stream sequence, or of these; may be given several times",
    )


def selection_of(options: argparse.Namespace) -> Selection:
    """Return the selection that the options make.

    :raises SelectionError: they make none
    """
    from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection

    values: dict[str, Any] = {
        name.removeprefix("select_"): value
        for name, value in vars(options).items()
        if name.startswith("select_") and value not in (None, False)
    }
    if listed := values.get("sequences"):
        values["sequences"] = [sequence for span in listed for sequence in span]
    return Selection.of(values)


def _sequences(text: str) -> range:
    first, dash, last = text.partition("-")
    # Ranges of larger numbers have no length.
    if max(len(first), len(last)) > len(str(SEQUENCE)) or not first.isdecimal() or (dash and not last.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a stream sequence or a range such as 3-9, found {text!r}")
    low, high = int(first), int(last if dash else first)
    if not 0 < low <= high < low + _MOST_SEQUENCES:
        raise argparse.ArgumentTypeError(
            f"expected a range of 1 to {_MOST_SEQUENCES} stream sequences from 1 on, found {text!r}"
        )
    return range(low, high + 1)


def read_patch(option: str) -> JsonPatch:
    """Return the patch that an option gives: the JSON itself, the path of its file, or ``-``.

    :raises ArgumentError: the file can't be read
    :raises RedriveRequestError: it is no JSON Patch
    """
    from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch

    if option.lstrip().startswith("["):
        return JsonPatch.of(option)
    try:
        if option == _STANDARD_INPUT:
            content = sys.stdin.buffer.read(_MOST_BYTES)
        else:
            with Path(option).open("rb") as file:
                content = file.read(_MOST_BYTES)
        return JsonPatch.of(content.decode())
    except OSError as error:
        raise ArgumentError(
            f"expected a JSON Patch, a JSON array, or its file, found {error.strerror} for {option[:200]!r}"
        ) from None
    except UnicodeDecodeError:
        raise ArgumentError(f"expected a JSON Patch in {option!r}, found bytes that aren't UTF-8") from None
