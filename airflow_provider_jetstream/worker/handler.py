"""What a handler takes: a delivery, or the body as a pydantic model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

from airflow_provider_jetstream.worker.errors import InvalidBodyError, WorkerSetupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel, ValidationError

    from airflow_provider_jetstream.worker.delivery import Delivery

_TAKES_JOB = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_MOST_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler, called with what it takes.

    :param handler: the handler
    :param model: the model of the body, where the handler takes one
    :param with_delivery: whether it takes the delivery too
    """

    handler: Callable[..., Any]
    model: type[BaseModel] | None = None
    with_delivery: bool = False

    def __call__(self, job: Delivery) -> Any:
        """Call it.

        :param job: the job
        :return: what it returns; a coroutine where :attr:`is_async`
        :raises InvalidBodyError: the body isn't what the model takes
        """
        if self.model is None:
            return self.handler(job)
        from pydantic import ValidationError

        try:
            body = self.model.model_validate_json(job.body)
        except ValidationError as error:
            # Not the error's own text, which repeats what the body says.
            raise InvalidBodyError(_told(self.model, error)) from None
        return self.handler(body, job) if self.with_delivery else self.handler(body)

    @property
    def is_async(self) -> bool:
        """Whether a call gives a coroutine."""
        called = type(self.handler).__call__
        return inspect.iscoroutinefunction(self.handler) or inspect.iscoroutinefunction(called)


def read_handler(handler: Callable[..., Any]) -> Handler:
    """Find out what a handler takes.

    :param handler: takes a :class:`Delivery`; or a pydantic model, if its first parameter is annotated with one, and
        then a delivery as second parameter, if it has one
    :return: the handler to be called with deliveries
    :raises WorkerSetupError: it takes something else, or an annotation can't be read
    """
    try:
        signature = inspect.signature(handler)
    except (ValueError, TypeError):
        # Some builtins don't tell.
        return Handler(handler)
    positional = [each for each in signature.parameters.values() if each.kind in _TAKES_JOB]
    model = _model(handler, positional[0]) if positional else None
    given = (object(),) * (2 if model and len(positional) > 1 else 1)
    try:
        signature.bind(*given)
    except TypeError as error:
        raise WorkerSetupError(
            f"expected a handler that takes a job, or a pydantic model and a job, found {_name(handler)}{signature}:"
            f" {error}"
        ) from None
    return Handler(handler, model, with_delivery=len(given) > 1)


def _model(handler: Callable[..., Any], parameter: inspect.Parameter) -> type[BaseModel] | None:
    found = parameter.annotation
    if isinstance(found, str):
        try:
            hints = SimpleNamespace(__annotations__={parameter.name: found})
            found = get_type_hints(hints, globalns=_globals(handler))[parameter.name]
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            # Many import the type of what they get anyway for type checkers only.
            if found.rpartition(".")[2] == "Delivery":
                return None
            raise WorkerSetupError(
                f"expected an annotation that can be read while the worker runs, found {found!r} on {parameter.name} of"
                f" {_name(handler)}: {error}; import it outside of TYPE_CHECKING"
            ) from None
    if not isinstance(found, type):
        return None
    # A handler's process that takes no models starts without pydantic.
    from pydantic import BaseModel

    return found if issubclass(found, BaseModel) else None


def _globals(handler: Any) -> dict[str, Any]:
    while isinstance(handler, partial):
        handler = handler.func
    function = inspect.unwrap(handler)
    if not hasattr(function, "__globals__"):
        function = inspect.unwrap(type(function).__call__)
    return getattr(getattr(function, "__func__", function), "__globals__", {})


def _name(handler: Any) -> str:
    return str(getattr(handler, "__qualname__", None) or type(handler).__qualname__)


def _told(model: type[BaseModel], error: ValidationError) -> str:
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    told = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in problems[:_MOST_PROBLEMS]]
    more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
    return f"expected a body that is a valid {model.__name__}, found: {'; '.join(told)}{more}"
