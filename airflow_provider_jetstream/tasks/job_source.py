"""The ``jobs`` argument of an operator: a list, a callable or an iterator, kept from Airflow's templating."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from airflow_provider_jetstream.jetstream.errors import JobError

if TYPE_CHECKING:
    from airflow.sdk import Context


class JobSource:
    """A callable or an iterator in a template field, in a form that Airflow leaves alone.

    Airflow calls a bare callable there by itself, with arguments of its own, and once more when the task resumes. The
    text of a bare iterator holds a memory address, which would make a new version of the DAG at each parse.
    """

    def __init__(self, source: Callable[..., Iterable[object]] | Iterator[object]) -> None:
        self._source = source

    def __repr__(self) -> str:
        named = self._source if callable(self._source) else type(self._source)
        return (
            f"<jobs of {getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', type(named).__qualname__)}>"
        )

    @classmethod
    def wrap(cls, jobs: Any) -> Any:
        """Wrap callables and iterators; anything else stays as it is."""
        return cls(jobs) if callable(jobs) or isinstance(jobs, Iterator) else jobs

    def jobs(self, context: Context) -> Iterable[object]:
        """Return the jobs; a callable is called with those values of the context that its parameters name."""
        if not callable(self._source):
            return self._source
        return self._source(**_call_arguments(self._source, context))


def resolve_jobs(argument: Any, context: Context) -> Iterable[object]:
    """Resolve an operator's ``jobs`` argument after templating.

    :raises JobError: it is a single job, or nothing that can be iterated
    """
    jobs = argument.jobs(context) if isinstance(argument, JobSource) else argument
    require_jobs(jobs)
    return cast("Iterable[object]", jobs)


def require_jobs(jobs: object) -> None:
    """Refuse a ``jobs`` argument that holds no jobs.

    :raises JobError: it is a single job, or nothing that can be iterated
    """
    if isinstance(jobs, JobSource):
        return
    if isinstance(jobs, (str, bytes, Mapping)) or not isinstance(jobs, Iterable):
        hint = "put a single job into a list"
        if isinstance(jobs, str):
            hint += ", and set render_template_as_native_obj on the DAG where a template gives a list"
        raise JobError(f"expected jobs as a list or an iterator, found {type(jobs).__name__}: {hint}")


def _call_arguments(function: Callable[..., Any], context: Context) -> Mapping[str, Any]:
    try:
        from airflow.sdk.bases.decorator import KeywordParameters
    except ImportError:  # Airflow 3.1
        from airflow.utils.operator_helpers import KeywordParameters  # type: ignore[attr-defined]

    arguments: Mapping[str, Any] = KeywordParameters.determine(function, (), context).unpacking()
    return arguments
