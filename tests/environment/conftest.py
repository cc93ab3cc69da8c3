"""The environment without Airflow, created once per process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testbed.environments import create_bare_environment

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment like that of a worker container: without Airflow and Spark."""
    return create_bare_environment(tmp_path_factory.mktemp("bare") / "venv")
