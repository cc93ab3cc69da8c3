"""What a task knows of its run, and what Airflow learns of it: identity, values that the run lacks, time left, outcome.

The identity is that of audit records, and of ids that all tries of a task share. A run without a logical date has no
ds, ts or data interval. Airflow applies ``execution_timeout`` only while a task runs, so a deferral observes it here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from airflow.sdk import get_current_context

from airflow_provider_jetstream.airflow_compat import AirflowFailException
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError, JobError, TerminalError
from airflow_provider_jetstream.tasks import runtime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import jinja2
    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.origin import Origin, TaskTry


def origin_of(context: Context, idempotency_key: str | None = None, operation: str | None = None) -> Origin:
    """Return the task as the origin of jobs; the same for all its tries.

    :param idempotency_key: stands for the run in the ids of the jobs
    :param operation: one of several calls of the task that publish
    :raises ArgumentError: the context has no task instance
    """
    instance = context.get("ti")
    if instance is None:
        raise ArgumentError(
            "expected a task's context with its task instance as ti, found none: run the task with dag.test(), or give"
            " execute a context whose ti has dag_id, run_id, task_id, map_index and try_number"
        )
    return runtime.Origin(
        instance.dag_id,
        instance.run_id,
        instance.task_id,
        -1 if instance.map_index is None else instance.map_index,
        idempotency_key=idempotency_key,
        operation=operation,
        max_tries=getattr(instance, "max_tries", None),
        attempt=_task_try(context),
    )


def _task_try(context: Context) -> TaskTry:
    instance, run = context["ti"], context.get("dag_run")
    started = getattr(run, "start_date", None)
    try_id = _uuid_text(getattr(instance, "id", None))
    version = getattr(instance, "dag_version_id", None)
    return runtime.TaskTry(
        run_started=started.astimezone(UTC).isoformat() if isinstance(started, datetime) else None,
        clear_number=_number(getattr(run, "clear_number", None)),
        number=_number(getattr(instance, "try_number", None)),
        try_id=try_id,
        dag_version=None if version is None else str(version),
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _uuid_text(value: object) -> str | None:
    try:
        return str(UUID(str(value)))
    except ValueError:
        return None


def audit_identity(context: Context) -> dict[str, Any]:
    """Return the fields that identify the task and its try in audit records, and the person who triggered its run."""
    identity = {**_fields(origin_of(context)), "try_number": context["ti"].try_number}
    # Airflow knows it of runs that a person has triggered.
    person = getattr(context.get("dag_run"), "triggering_user_name", None)
    return identity | ({"person": person} if isinstance(person, str) and person else {})


def task_key(context: Context) -> str:
    """Return a key that all tries of a task share: one token, since run ids may hold dots and white space."""
    return origin_of(context).key


def _fields(origin: Origin) -> dict[str, Any]:
    return {
        "dag_id": origin.dag_id,
        "run_id": origin.run_id,
        "task_id": origin.task_id,
        "map_index": origin.map_index,
    }


# The calls of this process that publish, by task and try.
_calls: Counter[tuple[str, TaskTry | None]] = Counter()


def call_origin() -> Origin | None:
    """Return the origin of the jobs of one call; ``None`` outside of a task.

    Each call of a try is an operation of its own, by its number: two calls may publish equal jobs, and a retry that
    makes the same calls publishes none twice.
    """
    try:
        context = get_current_context()
    except RuntimeError:
        return None
    if not (instance := context.get("ti")):
        return None
    # The same in a retry, and another one where Airflow runs the task anew after a clear.
    origin = replace(origin_of(context), max_tries=instance.max_tries)
    call = _calls[origin.key, origin.attempt]
    _calls[origin.key, origin.attempt] += 1
    return replace(origin, operation=f"call-{call}") if call else origin


EXECUTION_TIMEOUT = "execution_timeout"
_LEAST = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class DeferralLimit:
    """For how long a task may be deferred.

    :param left: the time from now on
    :param argument: the argument of the operator that sets it
    """

    left: timedelta
    argument: str


def deferral_limit(operator: Any, limit: timedelta, argument: str) -> DeferralLimit:
    """Return the earlier of a time limit and what is left of the operator's ``execution_timeout``.

    That counts from the first start of this try: a task that was deferred before has used some of it.

    :param operator: the task's
    :param limit: counts from now on
    :param argument: the operator's argument that sets it
    """
    if (timeout := operator.execution_timeout) is None:
        return DeferralLimit(limit, argument)
    left = max(_LEAST, timeout - (datetime.now(UTC) - _first_start()))
    return DeferralLimit(left, EXECUTION_TIMEOUT) if left < limit else DeferralLimit(limit, argument)


def _first_start() -> datetime:
    context = _current_context()
    started: datetime | None = context["ti"].start_date if context else None
    return started or datetime.now(UTC)


def _current_context() -> Context | None:
    try:
        return get_current_context()
    except RuntimeError:
        return None


_OF_LOGICAL_DATE: Final = frozenset(
    {
        *("logical_date", "ds", "ds_nodash", "ts", "ts_nodash", "ts_nodash_with_tz"),
        *("data_interval_start", "data_interval_end"),
        *("prev_data_interval_start_success", "prev_data_interval_end_success"),
    }
)
_UNDEFINED: Final = re.compile(r"'(\w+)' is undefined")


class NamedMissingValues:
    """Part of an operator or a notifier: says what a template can use where its run lacks the value that it names."""

    def render_template(
        self,
        content: Any,
        context: Context,
        jinja_env: jinja2.Environment | None = None,
        seen_oids: set[int] | None = None,
    ) -> Any:
        """Render a template field.

        :raises AirflowFailException: the run has no value of that name
        """
        from jinja2 import UndefinedError

        with fail_on_terminal_errors():
            try:
                return super().render_template(content, context, jinja_env, seen_oids)  # type: ignore[misc]
            except UndefinedError as error:
                found = _UNDEFINED.fullmatch(str(error))
                if found is None or found[1] not in _OF_LOGICAL_DATE or found[1] in context:
                    raise
                raise _missing(found[1], f"the template {content!r}", context, ArgumentError) from None


def require_run_values(names: Collection[str], what: str, context: Context) -> None:
    """Refuse to call a function whose parameters name values that the run doesn't have.

    :param names: of the parameters without a default
    :param what: the function
    :raises JobError: the context lacks one of them
    """
    for name in names:
        if name not in context:
            raise _missing(name, what, context, JobError)


def strict_environment(environment: jinja2.Environment, name: str, context: Context) -> jinja2.Environment:
    """Return an environment that refuses ``None`` within a text: a key with that text would be equal in many runs.

    :param environment: the environment of the operator
    :param name: the name of the argument or field that is rendered
    """
    from jinja2 import StrictUndefined, Undefined

    def refuse_nothing(value: object) -> object:
        if isinstance(value, StrictUndefined):
            # Rendering raises, with the name.
            return value
        # Airflow has proxies for values that it looks up later, so None is compared as text.
        if isinstance(value, Undefined) or str(value) == "None":
            raise JobError(
                f"expected a value for {name}, found that its template, or a part of it, rendered to nothing,"
                f" which would be the same for many runs: see why, or leave it out; {_advice(context)}"
            )
        return value

    # Its own cache, since templates are compiled with the function.
    return environment.overlay(finalize=refuse_nothing, cache_size=0)


def _missing(
    name: str, what: str, context: Mapping[str, Any], error: type[JetStreamProviderError]
) -> JetStreamProviderError:
    return error(f"expected {name} for {what}, found that this run has none: {_advice(context)}")


def _advice(context: Mapping[str, Any]) -> str:
    if "logical_date" in context:
        return "use a value that every run has, such as dag_run.run_id"
    return (
        "it has no logical date, as runs of assets and runs that a person triggers without one; use dag_run.run_id, or"
        " dag_run.run_after for a time ({{ dag_run.run_after | ds }} for its day), which every run has"
    )


@contextmanager
def fail_on_terminal_errors() -> Iterator[None]:
    """Turn terminal errors into failures that Airflow doesn't retry; others pass through, with their code.

    :raises AirflowFailException: in place of a :class:`~airflow_provider_jetstream.jetstream.TerminalError`
    """
    try:
        yield
    except TerminalError as error:
        raise AirflowFailException(f"{error.code} {error}") from error
    except JetStreamProviderError as error:
        # In the error itself, whose traceback says where it comes from. Such blocks may be within each other.
        if not str(error).startswith(error.code):
            error.args = (f"{error.code} {error}", *error.args[1:])
        raise


def json_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a result to JSON's types: lists for tuples, text for keys.

    Airflow distinguishes a tuple from a list and shows it as an object with a class name, but only where the result
    wasn't part of a trigger's event. So converted, it is the same whether the task was deferred or not.
    """
    values: dict[str, Any] = json.loads(json.dumps(result))
    return values
