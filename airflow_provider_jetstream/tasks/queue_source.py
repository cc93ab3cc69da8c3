"""The queue argument of operators, sensors and hooks: a queue, its dict, or the path of its YAML file.

A relative path is one beside the file of the DAG, in which the author sees the queue's file. While Airflow parses that
file, it is the module that Airflow parses, and afterwards the DAG's ``fileloc``, which Airflow sets to this module's
file: one file, whichever module makes the DAG, in the DAG processor and in the task's process, which parses its own
copy. The argument itself keeps the path as it was written: an absolute one differs between machines, and would make
another version of the DAG on each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import is_absent, is_templated

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.queue.work_queue import QueueSource, WorkQueue


def load_queue(
    source: QueueSource | None, operator: Any = None, name: str = "work_queue", *, file: Path | None = None
) -> WorkQueue:
    """Load a queue of any form.

    :param operator: whose DAG's file relative paths are beside; the running task's where absent
    :param name: the argument's
    :param file: the DAG's file, where it is known
    :raises QueueDeclarationError: there is no such file, or its declaration can't be used
    """
    if is_absent(source) or not isinstance(source, runtime.WorkQueue | Mapping | str | Path):
        raise QueueDeclarationError(
            "?", [f"expected a WorkQueue, its dict, or the path of its YAML as {name}, found {source!r}"]
        )
    if isinstance(source, str) and _is_declaration(source):
        problem = (
            f"expected a WorkQueue, its dict, or the path of its YAML as {name}, found the text of a declaration: give"
            " the other task's output rather than a template of it, or yaml.safe_load(text)"
        )
        raise QueueDeclarationError("?", [problem])
    if isinstance(source, str | Path):
        return runtime.WorkQueue.load(_queue_file(source, file or dag_file(operator)))
    return runtime.WorkQueue.load(source)


def declared_queue(source: Any, operator: Any = None, name: str = "work_queue") -> WorkQueue | None:
    """Load the queue of an argument when the DAG is parsed.

    :return: ``None`` where only the task can know it: a template, another task's result, or an absolute path that this
        machine doesn't have
    :raises QueueDeclarationError: it is no queue, its file can't be used, or a relative path leads to none
    """
    if is_templated(source):
        return None
    if isinstance(source, str | Path) and Path(source).is_absolute() and not _exists(_queue_file(source, None)):
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
        runtime.require_dead_letters(queue)


def dag_file(operator: Any = None) -> Path | None:
    """Return the file that Airflow parses as a DAG's; ``None`` where there is none, as in a script.

    :param operator: the DAG's; the running task's where absent
    """
    file = _parsed_file()
    if file is None:
        dag = _running_dag() if operator is None else operator.dag if operator.has_dag() else None
        file = getattr(dag, "fileloc", None)
    return Path(file).absolute() if file else None


def _queue_file(path: str | Path, dag: Path | None) -> Path:
    """Return the absolute path of a queue's file.

    :param dag: the DAG's file, beside which a relative path is; that is one of the working directory where absent
    :raises QueueDeclarationError: it would lie in an archive
    """
    stated = Path(path)
    found = dag.parent / stated if dag else stated.absolute()
    for folder in found.parents:
        if _exists(folder, is_file=True):
            problem = (
                f"expected a file that can be opened by its path, found that {folder} is no folder: files in an archive"
                " of DAGs have no path of their own. Give the queue itself, such as"
                " yaml.safe_load(__loader__.get_data(<the path>)), or an absolute path outside of the archive"
            )
            raise QueueDeclarationError(str(found), [problem])
    return found


def _is_declaration(text: str) -> bool:
    """Return whether a text is YAML, or what a template makes of a dict, rather than a path."""
    return "\n" in text or text.lstrip().startswith(("{'", '{"'))


def _exists(path: Path, *, is_file: bool = False) -> bool:
    # A text that is no path at all, such as the YAML itself, may be too long for one.
    with suppress(OSError, ValueError):
        return path.is_file() if is_file else path.exists()
    return False


def _parsed_file() -> str | None:
    """Return the file that Airflow is parsing; ``None`` otherwise.

    Until it is parsed, ``fileloc`` is the file of the function that makes the DAG, which may be a factory's.
    """
    from airflow.sdk.definitions._internal.contextmanager import DagContext

    # By this name, Airflow finds the module whose file becomes the fileloc of each DAG that is made meanwhile.
    name = DagContext.current_autoregister_module_name
    return getattr(sys.modules.get(name), "__file__", None) if name else None


def _running_dag() -> Any:
    from airflow.sdk import get_current_context

    try:
        return get_current_context().get("dag")
    except RuntimeError:
        # No task runs in this process: a script, or a trigger.
        return None
