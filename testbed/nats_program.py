"""What stands in for the command ``nats``: requests, and backups of streams into folders, as the pages type them.

The command itself is no package of a registry that this project uses. This one sends the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nats.errors import NoRespondersError

from airflow_provider_jetstream.jetstream import ConnectionSettings, connect
from testbed.stream_backup import back_up, restore

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_BACKUP = "backup.pickle"
_SECONDS = 5.0


def main() -> int:
    """Do what the command line says, on the server of ``NATS_URL``."""
    parser = argparse.ArgumentParser(prog="nats")
    programs = parser.add_subparsers(dest="command", required=True)
    request = programs.add_parser("request")
    request.add_argument("subject")
    request.add_argument("body")
    request.add_argument("-H", dest="headers", action="append", default=[])
    stream = programs.add_parser("stream").add_subparsers(dest="action", required=True)
    backing_up = stream.add_parser("backup")
    backing_up.add_argument("stream")
    backing_up.add_argument("folder", type=Path)
    stream.add_parser("restore").add_argument("folder", type=Path)
    return asyncio.run(_run(parser.parse_args()))


async def _run(options: argparse.Namespace) -> int:
    async with connect(ConnectionSettings.from_environment(os.environ)) as connection:
        if options.command == "request":
            return await _request(connection, options)
        if options.action == "backup":
            options.folder.mkdir(parents=True)
            (options.folder / _BACKUP).write_bytes(pickle.dumps(await back_up(connection, options.stream)))
        else:
            # Written by this program.
            await restore(connection, pickle.loads((options.folder / _BACKUP).read_bytes()))  # noqa: S301
    return 0


async def _request(connection: NatsPyConnection, options: argparse.Namespace) -> int:
    headers = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in options.headers)}
    try:
        answer = await connection.client.request(
            options.subject, options.body.encode(), timeout=_SECONDS, headers=headers or None
        )
    except NoRespondersError:
        print("nats: error: nats: no responders available for request", file=sys.stderr)
        return 1
    print(answer.data.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
