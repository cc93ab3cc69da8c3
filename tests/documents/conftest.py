"""A server for each test: the documents' streams have fixed names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.foreign_programs import LEDGER
from testbed.nats_server import NatsServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """The file in which foreign programs record what they have done."""
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def program_env(nats: NatsServer, ledger: Path) -> dict[str, str]:
    """The environment of foreign programs."""
    return {"NATS_URL": nats.url, LEDGER: str(ledger)}
