"""Ports are given to one process at a time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from testbed import ports

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOLDER = """
import sys
from testbed import ports
ports._CANDIDATES = range(int(sys.argv[1]), int(sys.argv[2]))
print(ports.free_port(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def port_of_another_process(candidates: range) -> Iterator[int]:
    command = [sys.executable, "-c", _HOLDER, str(candidates.start), str(candidates.stop)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin
        assert holder.stdout
        yield int(holder.stdout.readline())
        holder.stdin.close()


@pytest.mark.slow
def test_a_port_is_nobody_elses_while_its_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = range(32_100, 32_102)  # beyond those that other tests get their ports from
    monkeypatch.setattr(ports, "_CANDIDATES", candidates)
    with port_of_another_process(candidates) as theirs:
        (left,) = set(candidates) - {theirs}
        assert ports.free_port() == left
        with pytest.raises(OSError, match=r"found 0 free ports on 127\.0\.0\.1, expected 1"):
            ports.free_port()
    assert ports.free_port() == theirs
