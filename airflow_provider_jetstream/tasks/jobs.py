"""The ``jobs`` argument of an operator: kept from Airflow's templating, its templates rendered, and its jobs checked.

What can be said of jobs before any is sent is said of a list when the DAG is parsed, and once more when it is rendered.
"""

from __future__ import annotations

import inspect
from collections import UserList
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, subject_problem
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JobError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.task_values import given_fields, json_value
from airflow_provider_jetstream.tasks import runtime
from airflow_provider_jetstream.tasks.arguments import is_absent, is_templated, parse_count
from airflow_provider_jetstream.tasks.context import require_run_values

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream.publishing.job import JobIdSource
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

# A template of the body may render to nothing: that is a body.
_FREE_FIELDS = ("body", "headers")
# How much Airflow shows of a field by default, and what stays free for the last line.
_SHOWN_TEXT = 4096
_RESERVE = 64
_TEXTS = ("subject", "id", "advisory", "partition_key", "unique")


class RenderedJobs(UserList[Any]):
    """The jobs of a task after templating, in a form that Airflow shows as their author wrote them.

    Airflow would show a job by what an XCom stores of it.
    """

    @classmethod
    def wrap(cls, jobs: Any) -> Any:
        """Wrap a list or a tuple; anything else stays as it is."""
        return cls(jobs) if isinstance(jobs, list | tuple) else jobs

    def serialize(self) -> list[Any]:
        """Return the first jobs, as many as Airflow shows, and how many more there are."""
        room = conf.getint("core", "max_templated_field_length", fallback=_SHOWN_TEXT) - _RESERVE
        shown: list[Any] = []
        for job in self:
            written = _as_written(job)
            room -= len(str(written)) + 2
            if room < 0 and len(self) > 1:
                return [*shown, f"… and {len(self) - len(shown)} more"]
            shown.append(written)
        return shown


def _as_written(job: object) -> Any:
    try:
        if isinstance(job, Job):
            return {name: json_value(value) for name, value in given_fields(job).items()}
        return json_value(job)
    except RecursionError:
        return f"<{type(job).__name__} of too many levels>"


class JobSource:
    """A callable or an iterator in a template field, in a form that Airflow leaves alone.

    Airflow calls a bare callable there by itself, with arguments of its own, and once more when the task resumes. The
    text of a bare iterator holds a memory address, which would make a new version of the DAG at each parse.
    """

    def __init__(self, source: Callable[..., Iterable[object]] | Iterator[object]) -> None:
        self._source = source

    def __repr__(self) -> str:
        named = self._source if callable(self._source) else type(self._source)
        # Without its module: Airflow names that of a DAG's file after the file's path, which another machine, or
        # another version of a git bundle, has elsewhere.
        return f"<jobs of {getattr(named, '__qualname__', type(named).__qualname__)}>"

    @classmethod
    def wrap(cls, jobs: Any) -> Any:
        """Wrap callables and iterators; anything else stays as it is.

        :raises JobError: a callable can't be called with values of the context, or returns a coroutine
        """
        if callable(jobs):
            _check_callable(jobs)
        return cls(jobs) if callable(jobs) or isinstance(jobs, Iterator | AsyncIterator) else jobs

    def jobs(self, context: Context) -> Iterable[object]:
        """Return the jobs; a callable is called with those values of the context that its parameters name."""
        if not callable(self._source):
            return self._source
        return self._source(**_call_arguments(self._source, context))


def resolve_jobs(argument: Any, context: Context) -> Iterable[object]:
    """Resolve an operator's ``jobs`` argument after templating.

    :raises JobError: it holds no jobs, or not each once in an order
    """
    jobs = argument.jobs(context) if isinstance(argument, JobSource) else argument
    if isinstance(jobs, RenderedJobs):
        jobs = jobs.data
    require_jobs(jobs)
    return cast("Iterable[object]", jobs)


def require_jobs(jobs: object) -> None:
    """Refuse a ``jobs`` argument that holds no jobs.

    :raises JobError: it is a single job, a set, a table, or nothing that can be iterated
    """
    if isinstance(jobs, JobSource):
        return
    if isinstance(jobs, set | frozenset):
        raise _no_jobs(jobs, "a set drops equal jobs and has another order in each process; make a list of it")
    if hasattr(jobs, "__dataframe__") or (hasattr(jobs, "columns") and hasattr(jobs, "dtypes")):
        raise _no_jobs(
            jobs,
            "iterating over a table gives the names of its columns; give its rows, such as"
            ' frame.to_dict("records") of pandas or frame.to_dicts() of polars',
        )
    if isinstance(jobs, str | bytes | bytearray | memoryview | Mapping | Job) or not isinstance(
        jobs, Iterable | AsyncIterable
    ):
        hint = "put a single job into a list"
        if jobs is None:
            hint = "the task or function that makes them returned nothing; return a list, an empty one for no jobs"
        if isinstance(jobs, str):
            hint += ", and set render_template_as_native_obj on the DAG where a template gives a list"
        if inspect.isawaitable(jobs):
            hint = "it is asynchronous and isn't awaited; write the function with def, or let it yield the jobs"
            if inspect.iscoroutine(jobs):
                jobs.close()
        raise _no_jobs(jobs, hint)


def _no_jobs(found: object, hint: str) -> JobError:
    return JobError(f"expected jobs as a list or an iterator, found {type(found).__name__}: {hint}")


def _check_callable(function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise JobError(
            f"expected a function that returns or yields jobs, found {function!r}, which returns a coroutine: write it"
            " with def, or let it yield the jobs"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # A function of an extension module may have no signature.
        return
    context = _context_names()
    for parameter in parameters:
        if _is_required(parameter) and (parameter.kind is parameter.POSITIONAL_ONLY or parameter.name not in context):
            raise JobError(
                "expected jobs as a function whose parameters name values of the task's context, such as dag_run or"
                f" params, found {parameter.name} among those of {function!r}: rename it, or give it a default"
            )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return [name for name, parameter in inspect.signature(function).parameters.items() if _is_required(parameter)]
    except (TypeError, ValueError):
        # A function of an extension module may have no signature.
        return []


def _context_names() -> frozenset[str]:
    from airflow.sdk import Context

    return frozenset(Context.__annotations__)


def _call_arguments(function: Callable[..., Any], context: Context) -> Mapping[str, Any]:
    try:
        from airflow.sdk.bases.decorator import KeywordParameters
    except ImportError:  # Airflow 3.1
        from airflow.utils.operator_helpers import KeywordParameters  # type: ignore[attr-defined]

    shown = getattr(function, "__name__", repr(function))
    require_run_values(_required_parameters(function), f"the parameter of the function {shown} of jobs", context)
    arguments: Mapping[str, Any] = KeywordParameters.determine(function, (), context).unpacking()
    return arguments


def rendered_job(job: Job, render: Callable[[Any, str], Any]) -> Job:
    """Return the job with its templates rendered; what holds none stays as it is.

    :param render: renders one value, strictly where it is given the name of a field in which nothing may be nothing
    :raises JobError: a field but the body rendered to nothing, or to a value that it can't have
    """
    values: dict[str, Any] = {}
    for field in fields(job):
        value = getattr(job, field.name)
        if not is_templated(value):
            continue
        is_free = field.name in _FREE_FIELDS
        rendered = render(dict(value) if isinstance(value, Mapping) else value, "" if is_free else field.name)
        if not is_free and is_absent(rendered):
            raise JobError(
                f"expected a value for {field.name} of a job, found that its template {value!r} rendered to nothing:"
                " see why, or leave it out"
            )
        # With render_template_as_native_obj, the text of a number becomes the number.
        if field.name in _TEXTS and isinstance(rendered, int) and not isinstance(rendered, bool):
            rendered = str(rendered)
        elif field.name == "headers" and isinstance(rendered, Mapping):
            rendered = {name: str(text) for name, text in rendered.items()}
        values[field.name] = rendered
    return replace(job, **values) if values else job


def references_of(jobs: object) -> list[Any]:
    """Return the values of jobs that may be results of other tasks, on which the publishing task depends."""
    if not isinstance(jobs, list | tuple):
        return []
    return [getattr(job, field.name) for job in jobs if isinstance(job, Job) for field in fields(job)]


def check_subject(subject: object, queue: WorkQueue | None = None) -> None:
    """Refuse what is no subject of a job, when the DAG is parsed.

    :param queue: ``None`` where it isn't known yet
    :raises ArgumentError: it is none, or one that the queue doesn't capture
    """
    if subject is None or is_templated(subject):
        return
    if not isinstance(subject, str) or not subject.strip():
        raise ArgumentError(f"expected text as subject, found {subject!r}: correct it")
    problem = runtime.placeholder_problem(subject) if "{" in subject or "}" in subject else None
    if problem := problem or subject_problem(runtime.partition_subject(subject, 0), wildcards=False):
        raise ArgumentError(f"expected the subject of a job as subject, found {subject!r}: {problem}; correct it")
    if queue is None:
        return
    captured = queue.subjects
    if not covered_by_any(captured, runtime.partition_subject(subject, 0)):
        raise ArgumentError(
            f"expected a subject of {queue.name} ({', '.join(captured)}) as subject, found {subject!r}: choose one of"
            " them, or add this one to the declaration"
        )
    if "{" in subject and queue.partition_count(subject) is None:
        raise ArgumentError(
            f"expected a subject on which a consumer of {queue.name} has partitions, found {subject!r}: declare one"
            " with partitions and such a filter, or name another subject"
        )


def check_known_jobs(
    jobs: object, subject: Any, queue: WorkQueue | None, job_id: JobIdSource | None = None, *, waits: bool
) -> None:
    """Refuse jobs of a list that can't be published; leave to the task what holds templates, or needs the queue's file.

    :param subject: the subject of jobs that name none
    :param queue: ``None`` where it isn't known yet
    :param waits: whether the task waits for the jobs
    :raises JobError: a job can't be published as it is, or can't be waited for
    """
    if not isinstance(jobs, list | tuple):
        return
    for index, item in enumerate(jobs):
        if not is_templated(item):
            _require_body(index, Job.of(item))
    if queue is None or is_templated(subject):
        return
    if not is_templated(jobs):
        _prepare(jobs, subject, queue, job_id, waits=waits)
        return
    for index, item in enumerate(jobs):
        if is_templated(item):
            continue
        try:
            _prepare([item], subject, queue, job_id, waits=waits)
        except JobError as error:
            raise type(error)(str(error).replace("job 0", f"job {index}", 1)) from None


def check_min_completed(jobs: object, min_completed: object) -> None:
    """Refuse to wait for more completions than there are jobs.

    :raises ArgumentError: there are fewer jobs in the list
    """
    if min_completed is None or is_templated(min_completed) or not isinstance(jobs, list | tuple):
        return
    if len(jobs) < parse_count("min_completed", min_completed):
        raise ArgumentError(
            f"expected at least as many jobs as min_completed, found {len(jobs)} jobs and {min_completed}, so"
            " that the task could never succeed: lower it, or add jobs"
        )


def _prepare(
    jobs: Iterable[object], subject: str | None, queue: WorkQueue, job_id: JobIdSource | None, *, waits: bool
) -> None:
    prepared = runtime.PreparedJobs(
        jobs,
        subject=subject,
        origin=None,
        batch="",
        queue=queue,
        limit=runtime.SizeLimit.of(queue),
        job_id=job_id,
        captured=queue.subjects,
    )
    if waits:
        prepared.then(runtime.refuse_schedule)
    list(prepared.batches())


def _require_body(index: int, job: Job) -> None:
    try:
        job.payload()
    except JobError as error:
        raise type(error)(f"job {index}: {error}") from None
