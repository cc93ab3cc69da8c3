"""Airflow's names that moved after 3.1.

The provider ``common-compat`` has them all only from 1.8 on; the constraints of Airflow 3.1.0 hold 1.7.4.
"""

# The types are those of newer versions.
# mypy: disable-error-code="no-redef, attr-defined, assignment"

from __future__ import annotations

try:
    from airflow.sdk.configuration import conf
    from airflow.sdk.exceptions import (
        AirflowConfigException,
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowRescheduleException,
        AirflowSensorTimeout,
        AirflowSkipException,
    )
    from airflow.sdk.observability.stats import Stats
    from airflow.sdk.plugins_manager import AirflowPlugin
except ImportError:  # Airflow 3.1
    from airflow.configuration import conf
    from airflow.exceptions import (
        AirflowConfigException,
        AirflowException,
        AirflowFailException,
        AirflowNotFoundException,
        AirflowRescheduleException,
        AirflowSensorTimeout,
        AirflowSkipException,
    )
    from airflow.plugins_manager import AirflowPlugin
    from airflow.stats import Stats

__all__ = [
    "AirflowConfigException",
    "AirflowException",
    "AirflowFailException",
    "AirflowNotFoundException",
    "AirflowPlugin",
    "AirflowRescheduleException",
    "AirflowSensorTimeout",
    "AirflowSkipException",
    "Stats",
    "conf",
]
