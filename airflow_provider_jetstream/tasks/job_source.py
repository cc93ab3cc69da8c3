"""Jobs that are made by a callable or an iterator, kept away from Airflow's templating."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import KeywordParameters

from airflow_provider_jetstream.jetstream.errors import JobError

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context


class JobSource:
    """A callable or an iterator in a template field, which Airflow leaves alone in this form.

    Airflow calls a callable there by itself, with arguments of its own, and once more when the task resumes; and the
    text of an iterator, which holds an address, would make a new version of the DAG at each parse.

    :param source: what makes the jobs
    """

    def __init__(self, source: Callable[..., Iterable[object]] | Iterator[object]) -> None:
        self._source = source

    def __repr__(self) -> str:
        kind = self._source if callable(self._source) else type(self._source)
        return f"<jobs of {getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}>"

    @classmethod
    def keep(cls, jobs: Any) -> Any:
        """Wrap what Airflow may not touch.

        :param jobs: the operator's argument
        :return: a source for callables and iterators, anything else as it is
        """
        return cls(jobs) if callable(jobs) or isinstance(jobs, Iterator) else jobs

    def make(self, context: Context) -> Iterable[object]:
        """Make the jobs.

        :param context: the task's context; a callable gets what its parameters name
        :return: the jobs
        """
        if not callable(self._source):
            return self._source
        return self._source(**KeywordParameters.determine(self._source, (), context).unpacking())


def jobs_of(given: Any, context: Context) -> Iterable[object]:
    """Take the jobs from what an operator was given, after templating.

    :param given: jobs, or a source of them
    :param context: the task's context
    :return: the jobs
    :raises JobError: if it is one job, or nothing that jobs can be taken from
    """
    jobs = given.make(context) if isinstance(given, JobSource) else given
    if isinstance(jobs, (str, bytes, Mapping)) or not isinstance(jobs, Iterable):
        hint = "put a single job into a list"
        if isinstance(jobs, str):
            hint += ", and set render_template_as_native_obj on the DAG where a template gives a list"
        raise JobError(f"expected jobs as a list or an iterator, found {type(jobs).__name__}: {hint}")
    return jobs
