"""Values of a task's context that a run may not have: without a logical date, there is no ds, ts or data interval."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError, JobError
from airflow_provider_jetstream.tasks.outcome import fail_on_terminal_errors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import jinja2
    from airflow.sdk import Context

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
    """Return an environment that refuses ``None`` within a text: one such key would be the same for many runs.

    :param environment: the operator's
    :param name: of the argument or field that is rendered
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
