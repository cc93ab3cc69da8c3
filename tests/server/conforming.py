"""What tests of workers in several languages share: ``jetstream-worker conform``, and what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from testbed.nats_server import NatsServer

# Those of the contract; and in progress, completion, acknowledgement, failure, record and termination, killed and cut
# off before; the last five of them after, too.
LINES = 15 + 2 * (6 + 5)


def conform(
    server: NatsServer, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "airflow_provider_jetstream.worker.cli", "conform", "--limit", "240", *arguments]
    env = {**os.environ, "NATS_URL": server.url, **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=env)


def broken(found: subprocess.CompletedProcess[str]) -> dict[str, str]:
    lines = json.loads(found.stdout)
    assert len(lines) == LINES, found.stderr
    assert len({line["line"] for line in lines}) == len(lines)
    return {line["line"]: line["problem"] for line in lines if line["problem"]}
