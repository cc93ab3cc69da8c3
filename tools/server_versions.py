"""``python -m tools.server_versions``: scans and redrives with the oldest server and the first of each later release.

What a server lacks is skipped, with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys

from testbed.nats_binaries import nats_server_of
from tools.line_record import ROOT

_SERVERS = ("2.10.27", "2.11.0", "2.12.0", "2.14.0")
_ABOUT = (
    "advisory_probe dead_letters preconditions claims late_ends redrive redrive_audit redrive_cut_off redrive_faults"
    " redrive_in_place redrive_parking redrive_preview redrive_rate redrive_repair redrive_room redrive_selection"
    " hostile_jobs"
)


def main() -> int:
    """Run the tests with one server after the other, and return the exit code of the first that fails."""
    pytest = [sys.executable, "-m", "pytest", "-n"]
    files = [f"tests/server/test_{about}.py" for about in _ABOUT.split()]
    done = subprocess.run([*pytest, "4", "tests/server/test_server_versions.py"], cwd=ROOT, check=False)
    for version in _SERVERS:
        if done.returncode:
            break
        env = {**os.environ, "NATS_SERVER_BIN": str(nats_server_of(version)), "OLDER_SERVER": version}
        done = subprocess.run([*pytest, "3", "-rs", *files], cwd=ROOT, env=env, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
