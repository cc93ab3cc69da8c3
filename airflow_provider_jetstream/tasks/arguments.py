"""Checks of arguments when a DAG is parsed: a wrong value fails the parsing, not the first run weeks later.

Templates and results of other tasks are left to the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.tasks.template_values import is_templated


def check_work_queue(value: object, name: str = "work_queue") -> None:
    """Refuse what is no work queue; the file of a path is read by the task.

    :param name: the argument's
    :raises QueueDeclarationError: it is none
    """
    if is_templated(value):
        return
    if isinstance(value, Mapping):
        WorkQueue.load(value)
    elif not (isinstance(value, WorkQueue | Path) or (isinstance(value, str) and value.strip())):
        raise QueueDeclarationError(
            "?", [f"expected a WorkQueue, its dict, or the path of its YAML as {name}, found {value!r}"]
        )


def check_text(**values: object) -> None:
    """Refuse what is no text, or is empty.

    :param values: by the names of the arguments
    :raises ValueError: one is none
    """
    for name, value in values.items():
        if not is_templated(value) and not (isinstance(value, str) and value.strip()):
            raise ValueError(f"expected text as {name}, found {value!r}")


def check_flags(**values: object) -> None:
    """Refuse what is neither ``True`` nor ``False``: the text ``"false"`` would be true.

    :param values: by the names of the arguments
    :raises ValueError: one is neither
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"expected True or False as {name}, which takes no template, found {value!r}")


def check_counts(least: int, **values: object) -> None:
    """Refuse what is no whole number, or too small.

    :param values: by the names of the arguments; ``None`` for one that is absent
    :raises ValueError: one is none
    """
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"expected a whole number of at least {least} as {name}, found {value!r}")


def check_timedelta(**values: object) -> None:
    """Refuse what is no positive :class:`~datetime.timedelta`.

    :param values: by the names of the arguments
    :raises ValueError: one is none
    """
    for name, value in values.items():
        if not isinstance(value, timedelta) or value <= timedelta():
            raise ValueError(f"expected a timedelta above 0, such as timedelta(hours=1), as {name}, found {value!r}")
