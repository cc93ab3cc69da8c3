"""Checks that an Airflow is installed that the skins can stand on, without importing it."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec

MINIMUM_AIRFLOW = (3, 1)

# The first one is Airflow itself since 3.0; the second is the meta package of all versions.
_DISTRIBUTIONS = ("apache-airflow-core", "apache-airflow")


@cache
def require_airflow() -> None:
    """Refuse to import a skin where Airflow is missing or too old.

    :raises ModuleNotFoundError: its ``name`` is ``airflow``
    """
    # Where Airflow parses a DAG file, it is imported already, and says itself which version it is.
    version = getattr(sys.modules.get("airflow"), "__version__", None)
    if version is None:
        if find_spec("airflow") is None:
            raise _unusable("none")
        version = _installed_version()
    # A source tree without a distribution is taken as new enough.
    if version is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < MINIMUM_AIRFLOW:
        raise _unusable(version)


def _installed_version() -> str | None:
    for distribution in _DISTRIBUTIONS:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _unusable(found: str) -> ModuleNotFoundError:
    minimum = ".".join(map(str, MINIMUM_AIRFLOW))
    return ModuleNotFoundError(
        f"expected Apache Airflow {minimum} or newer for the hooks, operators, sensors and triggers of this package,"
        f' found {found}; run: pip install "airflow-provider-jetstream[airflow]"',
        name="airflow",
    )
