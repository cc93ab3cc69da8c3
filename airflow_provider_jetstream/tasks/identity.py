"""Who a task is, for records and ids that all its tries share."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.origin import Origin

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

_KEY_DIGITS = 32


def origin_of(context: Context) -> Origin:
    """Name the task in the jobs that it publishes.

    :param context: its context
    :return: what identifies it, the same for all its tries
    """
    instance = context["ti"]
    map_index = instance.map_index
    return Origin(instance.dag_id, instance.run_id, instance.task_id, -1 if map_index is None else map_index)


def who_of(context: Context) -> dict[str, Any]:
    """Name the task for the audit.

    :param context: its context
    :return: what identifies it and its try
    """
    return {**_instance(context), "try_number": context["ti"].try_number}


def run_key(context: Context) -> str:
    """Give a key that all tries of a task have in common.

    :param context: its context
    :return: one token, since run ids may hold dots and white space
    """
    return instance_key(origin_of(context))


def instance_key(origin: Origin) -> str:
    """Give the key of a task whose context isn't at hand.

    :param origin: the task
    :return: what :func:`run_key` gives in the task itself
    """
    return sha256(json.dumps(list(_identity(origin).values())).encode()).hexdigest()[:_KEY_DIGITS]


def _instance(context: Context) -> dict[str, Any]:
    return _identity(origin_of(context))


def _identity(origin: Origin) -> dict[str, Any]:
    identity = asdict(origin)
    del identity["round"]
    return identity
