"""The queue argument of operators, sensors and hooks: a queue, its dict, or the path of its YAML file.

A relative path is one beside the file of the DAG, in which the author sees the queue's file; where there is none, it is
one of the process's working directory. The argument itself keeps the path as it was written: an absolute one differs
between machines, and would make another version of the DAG on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters.scan_context import require_dead_letters
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.tasks.template_values import is_absent, is_templated

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource


def load_queue(source: QueueSource | None, operator: Any = None, name: str = "work_queue") -> WorkQueue:
    """Load a queue of any form.

    :param operator: whose DAG's file relative paths are beside; the running task's where absent
    :param name: the argument's
    :raises QueueDeclarationError: there is no such file, or its declaration can't be used
    """
    if is_absent(source) or not isinstance(source, WorkQueue | Mapping | str | Path):
        raise QueueDeclarationError(
            "?", [f"expected a WorkQueue, its dict, or the path of its YAML as {name}, found {source!r}"]
        )
    if isinstance(source, str | Path):
        return WorkQueue.load(queue_file(source, operator))
    return WorkQueue.load(source)


def declared_queue(source: Any, operator: Any = None, name: str = "work_queue") -> WorkQueue | None:
    """Load the queue of an argument when the DAG is parsed.

    :return: ``None`` where only the task can know it: a template, another task's result, or an absolute path that this
        machine doesn't have
    :raises QueueDeclarationError: it is no queue, its file can't be used, or a relative path leads to none
    """
    if is_templated(source):
        return None
    if isinstance(source, str | Path) and Path(source).is_absolute() and not _exists(Path(source)):
        return None
    return load_queue(source, operator, name)


def require_events(queue: WorkQueue | None) -> None:
    """Refuse to wait for jobs whose ends nothing stores.

    :param queue: ``None`` where it isn't known yet
    :raises QueueDeclarationError: the queue declares no events
    """
    if queue is not None and queue.events is None:
        raise QueueDeclarationError(
            queue.name, ["expected events, so that completions are stored and can be waited for: declare them"]
        )


def require_dead_letter_queue(queue: WorkQueue | None) -> None:
    """Refuse to look for dead letters where a queue has no place for them.

    :param queue: ``None`` where it isn't known yet
    :raises QueueDeclarationError: the queue declares no dead letter queue
    """
    if queue is not None:
        require_dead_letters(queue)


def queue_file(path: str | Path, operator: Any = None) -> Path:
    """Return the absolute path of a queue's file.

    :param operator: whose DAG's file a relative path is beside; the running task's where absent
    """
    stated = Path(path)
    folder = _dag_folder(operator)
    beside = folder / stated if folder else None
    # A file is looked for beside the DAG first, and an error names that place.
    if beside is not None and (_exists(beside) or not _exists(stated)):
        return beside
    return stated.absolute()


def _exists(path: Path) -> bool:
    # A text that is no path at all, such as the YAML itself, may be too long for one.
    with suppress(OSError, ValueError):
        return path.exists()
    return False


def _dag_folder(operator: Any) -> Path | None:
    """Return the folder of the file that declares an operator's DAG; ``None`` where it has none."""
    dag = _running_dag() if operator is None else operator.dag if operator.has_dag() else None
    file = getattr(dag, "fileloc", None)
    return Path(file).absolute().parent if file else None


def _running_dag() -> Any:
    from airflow.sdk import get_current_context

    try:
        return get_current_context().get("dag")
    except RuntimeError:
        # No task runs in this process: a script, or a trigger.
        return None
