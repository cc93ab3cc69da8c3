"""example_workers/worker.go keeps docs/worker-contract.md, from which it was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conforming import broken, conform
from go_toolchain import NoGoError, badly_formatted, build_program

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer

WORKER = Path(__file__).parents[2] / "example_workers" / "worker.go"


@pytest.mark.slow
def test_the_go_worker_keeps_all_lines_also_where_it_is_killed_or_cut_off(nats: NatsServer, tmp_path: Path) -> None:
    program = tmp_path / "worker"
    try:
        assert badly_formatted(WORKER) == ""
        build_program(WORKER, program)
    except NoGoError as error:
        pytest.skip(str(error))
    found = conform(nats, "--json", "--", str(program))
    assert broken(found) == {}
    assert found.returncode == 0
