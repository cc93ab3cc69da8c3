"""The command ``jetstream-worker conform``: runs all trials of a worker, and prints which lines it keeps."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import DEFAULT_PORT, ConnectionSettings
from airflow_provider_jetstream.jetstream.client.wire import parse_server_info
from airflow_provider_jetstream.jetstream.errors import UnreachableError
from airflow_provider_jetstream.worker.conformance.lines import JOBS, BreakOffTrial, contract_lines
from airflow_provider_jetstream.worker.conformance.trial import TrialSettings, run_trial
from airflow_provider_jetstream.worker.errors import WorkerSetupError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from airflow_provider_jetstream.worker.conformance.lines import Line


_INFO: Final = b"INFO "
_BREAK_OFFS: Final = tuple(BreakOffTrial(after, kills) for kills in (True, False) for after in (False, True))
_BROKEN: Final = 1
_INTERRUPTED: Final = 130


async def conform(settings: ConnectionSettings, command: Sequence[str], folder: Path, limit: float) -> list[Line]:
    """Try a worker against its contract: docs/worker-contract.md, version 3.

    Each trial creates a queue of its own, and removes it at its end. The worker connects by ``NATS_URL``, the address
    of a proxy, and works on the consumer ``JOB_CONSUMER`` of the stream ``JOB_STREAM``; ``JOB_QUEUE`` is the path of
    the queue's file. What it makes of a job is given by the job's body.

    :param settings: of one server without TLS, since the proxy can't read TLS
    :param command: the worker's program and arguments
    :param folder: for what the workers print
    :param limit: seconds for one trial
    :raises WorkerSetupError: the worker can't be kept running, or the server can't be used for this
    """
    trials = TrialSettings(await _server(settings), command, folder, limit)
    prefix = f"conform-{uuid4().hex[:8]}"
    async with connect(settings) as connection:

        async def lines(broken_off: BreakOffTrial | None) -> list[Line]:
            if broken_off is None:
                return contract_lines(await run_trial(connection, trials, f"{prefix}-contract", JOBS))
            name = f"{prefix}-{broken_off.name}"
            places, kills = broken_off.break_offs, broken_off.kills
            found = await run_trial(connection, trials, name, broken_off.jobs, break_offs=places, kills=kills)
            return broken_off.lines(found)

        return [line for found in await map_concurrently(lines, [None, *_BREAK_OFFS]) for line in found]


async def _server(settings: ConnectionSettings) -> tuple[str, int]:
    """Return host and port of the server.

    :raises WorkerSetupError: the server asks for TLS, which the proxy can't read, or has other addresses, by which a
        worker would bypass the proxy
    """
    address = urlsplit(settings.servers[0])
    host, port = address.hostname or "", address.port or DEFAULT_PORT
    try:
        async with asyncio.timeout(settings.timeout):
            reader, writer = await asyncio.open_connection(host, port)
            line = await reader.readline()
    except (OSError, TimeoutError) as error:
        raise UnreachableError(
            f"no NATS server answers at {host}:{port}: {error or 'the time limit has passed'}"
        ) from None
    writer.close()
    info = parse_server_info(line.removeprefix(_INFO))
    if info.get("tls_required") or info.get("connect_urls") or len(settings.servers) > 1:
        raise WorkerSetupError(
            "expected one nats-server without TLS, whose messages a proxy can read, found"
            f" {'TLS' if info.get('tls_required') else 'a cluster'}: start one for this, as with nats-server -js"
        )
    return host, port


async def run_conform(options: argparse.Namespace) -> int:
    """Run the trials, print each line, and return the exit status: 1 where the worker breaks one.

    SIGINT and SIGTERM end the trials, whose workers and queues are removed then.
    """
    if task := asyncio.current_task():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    folder = Path(tempfile.mkdtemp(prefix="conform-"))
    try:
        lines = await conform(
            ConnectionSettings.from_environment(os.environ), options.worker_command, folder, options.limit
        )
    except asyncio.CancelledError:
        shutil.rmtree(folder, ignore_errors=True)
        print("jetstream-worker: interrupted; the queues of the trials are removed", file=sys.stderr)
        return _INTERRUPTED
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    broken = sum(bool(line.problem) for line in lines)
    print(_json(lines) if options.json else _text(lines))
    if not broken:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    print(f"What the workers printed is in {folder}", file=sys.stderr)
    return _BROKEN


def _json(lines: Sequence[Line]) -> str:
    return json.dumps(
        [{"line": line.name, "text": line.text, "problem": line.problem or None} for line in lines], indent=2
    )


def _text(lines: Sequence[Line]) -> str:
    width = max(len(line.name) for line in lines)
    rows = [
        f"{'BROKEN' if line.problem else 'kept':6}  {line.name:{width}}  {line.problem or line.text}" for line in lines
    ]
    kept = sum(not line.problem for line in lines)
    return "\n".join([*rows, f"{kept} of {len(lines)} lines kept"])
