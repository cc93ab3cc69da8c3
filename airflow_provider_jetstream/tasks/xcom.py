"""The form of what tasks return."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def plain(result: Mapping[str, Any]) -> dict[str, Any]:
    """Give a result the form that it has in JSON: lists for tuples, text for keys.

    Airflow keeps a tuple apart from a list and shows it as an object with a class name, but only where the result
    wasn't part of a trigger's event.

    :param result: what a task returns
    :return: the same whether the task was deferred or not
    """
    values: dict[str, Any] = json.loads(json.dumps(result))
    return values
