"""The sub-command ``dev``: a nats-server, example queues, workers and an Airflow with the page, on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.options import output_options, port
from airflow_provider_jetstream.jetstream.errors import ArgumentError

if TYPE_CHECKING:
    import argparse

    from airflow_provider_jetstream.command.output import Output

_PAGE_PORT = 8080
_NATS_PORT = 4222


def add_dev_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    dev = commands.add_parser(
        "dev",
        parents=[output_options()],
        help="try it: start a nats-server, busy queues, workers and an Airflow with the page here, until Ctrl-C",
        description="Starts all of it on the loopback address of this machine, with its files in a temporary folder;"
        " Ctrl-C and SIGTERM stop and remove everything. It needs the extra dev.",
    )
    dev.set_defaults(run=_run_dev)
    dev.add_argument(
        "--port", type=port, default=_PAGE_PORT, help=f"of Airflow with the page; {_PAGE_PORT} where absent"
    )
    dev.add_argument(
        "--nats-port",
        type=port,
        default=_NATS_PORT,
        metavar="PORT",
        help=f"of the nats-server; {_NATS_PORT} where absent",
    )
    dev.add_argument("--no-browser", action="store_true", help="don't open a browser")
    dev.add_argument(
        "--dags",
        metavar="FOLDER",
        help="your own DAGs, in place of the example's DAGs, queues and workers; the nats-server is empty then",
    )


async def _run_dev(options: argparse.Namespace, out: Output) -> ExitCode:
    from airflow_provider_jetstream.dev.requirements import require_extra

    nats_binary = require_extra()
    # They need psutil, which the extra brings.
    from airflow_provider_jetstream.dev import guide
    from airflow_provider_jetstream.dev.example_load import DAG_ID
    from airflow_provider_jetstream.dev.stack import DevStack, StackPorts

    began = time.monotonic()
    dags = _own_dags(options.dags)
    ports = StackPorts.chosen(options.port, options.nats_port)
    page = guide.page_url(ports.airflow_url)
    _stop_with_the_terminal()

    def ready() -> None:
        out.note(f"The page answers, {time.monotonic() - began:.0f} s after the start.")
        if not out.as_json:
            if dags:
                out.text(guide.own_dags_steps(dags, stack.folder))
            else:
                out.text(guide.next_steps(ports.airflow_url, ports.nats_url, DAG_ID, stack.folder))
            out.flush()
        if not options.no_browser and _has_display():
            webbrowser.open(page)

    with DevStack(ports, nats_binary, dags) as stack:
        if out.as_json:
            out.record({"page": page, "user": guide.USER, "password": guide.PASSWORD, "nats": ports.nats_url})
        else:
            out.text(guide.addresses(ports.airflow_url, ports.nats_url))
        out.flush()
        try:
            await stack.run(ready)
        except asyncio.CancelledError:
            out.note("stops everything, within a few seconds")
            raise
    return ExitCode.DONE


def _own_dags(folder: str | None) -> Path | None:
    if folder is None:
        return None
    path = Path(folder).absolute()
    if not path.is_dir():
        raise ArgumentError(f"expected a folder for --dags, found none at {path}: create it, or name another one")
    return path


def _stop_with_the_terminal() -> None:
    task = asyncio.current_task()
    if task and hasattr(signal, "SIGHUP"):
        # Not in a thread that isn't the process's first, and not on every platform.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, task.cancel)


def _has_display() -> bool:
    """Return whether a browser can open a window; one that runs in the terminal would hide what is printed."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
