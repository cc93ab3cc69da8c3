"""What ``jetstream-queue dev`` needs besides this package, and where its nats-server is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path  # noqa: TC003 - read by the documentation's generator
from typing import Final

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream.errors import ArgumentError

# The import names of what the extra brings, and what people call it.
_MODULES: Final = {"airflow": "Apache Airflow", "psutil": "psutil"}
_INSTALL: Final = 'run: pip install "airflow-provider-jetstream[dev]"'


def require_extra() -> Path:
    """Return the path of the nats-server.

    :raises ArgumentError: a package of the extra ``dev`` is missing, or no nats-server is found
    """
    missing = [name for module, name in _MODULES.items() if find_spec(module) is None]
    if missing:
        raise ArgumentError(
            f"expected the packages of the extra dev for jetstream-queue dev, found no {' and no '.join(missing)};"
            f" {_INSTALL}"
        )
    try:
        return find_nats_server()
    except FileNotFoundError as error:
        raise ArgumentError(
            f"expected a nats-server for jetstream-queue dev, found {error}; with Python 3.12 or later the extra dev"
            f" brings one: {_INSTALL}"
        ) from None
