"""The exception with which a task defers, which moved after Airflow 3.1."""

# The types are those of newer versions.
# mypy: disable-error-code="no-redef, attr-defined"

try:
    from airflow.sdk.exceptions import TaskDeferred
except ImportError:  # Airflow 3.1
    from airflow.exceptions import TaskDeferred

__all__ = ["TaskDeferred"]
