"""The environment without Airflow, created once per process."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.environments import create_bare_environment

_FOLDER = f"{Path(__file__).parent}/"


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment like that of a worker container: without Airflow and Spark."""
    return create_bare_environment(tmp_path_factory.mktemp("bare") / "venv")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(_FOLDER):
            item.add_marker("registry")
