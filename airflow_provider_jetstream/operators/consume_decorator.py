"""The decorator ``@task.jetstream_consume``: the decorated function is the handler of a consuming task.

It saves the name of a function that nothing else uses, its task id and the operator's import; the operators of this
package that take no function have no decorator.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.bases.decorator import get_unique_task_id, task_decorator_factory

from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from airflow.sdk.bases.decorator import TaskDecorator


class _DecoratedConsumeOperator(JetStreamConsumeOperator):
    custom_operator_name = "@task.jetstream_consume"
    template_fields: Sequence[str] = (*JetStreamConsumeOperator.template_fields, "op_kwargs")
    template_fields_renderers: ClassVar[dict[str, str]] = {"op_kwargs": "py"}

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        task_id: str,
        op_args: Sequence[Any] = (),
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if op_args:
            raise ArgumentError(
                f"expected arguments by name in the call of {task_id}, found {len(op_args)} by position: its first"
                " parameter takes each message"
            )
        self.op_kwargs = dict(op_kwargs or {})
        unique_id = get_unique_task_id(task_id, kwargs.get("dag"), kwargs.get("task_group"))
        handler = partial(python_callable, **self.op_kwargs) if self.op_kwargs else python_callable
        super().__init__(task_id=unique_id, handler=handler, **kwargs)
        self.python_callable = python_callable

    def rendered_handler(self) -> Callable[..., Any]:
        """Return the function with the arguments of its call in the DAG."""
        return partial(self.python_callable, **self.op_kwargs) if self.op_kwargs else self.python_callable


def jetstream_consume_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Make a consuming task of a handler.

    :param python_callable: the decorated function
    :param kwargs: the arguments of
        :class:`~airflow_provider_jetstream.operators.consume.JetStreamConsumeOperator`
    """
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=False,
        decorated_operator_class=_DecoratedConsumeOperator,
        **kwargs,
    )
