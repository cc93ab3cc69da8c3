"""The arguments that all instances of a mapped task share: known when the DAG is parsed, and checked then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow.sdk import BaseOperator

# Stands for what each instance gets by itself.
_MAPPED = "{{ mapped }}"


def check_shared_arguments(operator: type[BaseOperator], arguments: Mapping[str, Any], required: Iterable[str]) -> None:
    """Refuse wrong arguments of ``partial``, which Airflow gives to no constructor before a task runs.

    :param required: the arguments that the operator can't do without
    :raises JetStreamProviderError: an argument can't be used, or not together with the others
    """
    operator(**dict.fromkeys(required, _MAPPED) | dict(arguments) | {"_airflow_from_mapped": True})
