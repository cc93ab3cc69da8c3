"""A handler: the argument it takes (a delivery, or the body as a pydantic model), its result, and where it failed.

The digest of a failure is equal for equal faults. It leaves out what varies between two failures of one fault: line
numbers, messages, values, the depth of a recursion, the functions of the standard library and of installed packages,
and whether the handler ran in a task, a thread or a process. A traceback can't be pickled, so a handler's process
computes the digest and sends it.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import PurePath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, get_args, get_type_hints

from airflow_provider_jetstream.worker.errors import InvalidBodyError, WorkerSetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from pydantic import BaseModel, ValidationError

    from airflow_provider_jetstream.worker.delivery import Delivery


_POSITIONAL_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_MAX_PROBLEMS = 5
_DIGITS = 12
_MAX_NAME_LENGTH = 200
_MAX_ERRORS = 50
_MAX_FUNCTIONS = 20
_IGNORED_MODULES = sys.stdlib_module_names | {__name__.partition(".")[0]}
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# Comprehensions: since Python 3.12 they have no frames.
_INLINED = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_ATTRIBUTE = "_jetstream_failure"


@dataclass(frozen=True, slots=True)
class Handler:
    """A user's handler, called with a delivery; ``model`` is the pydantic model that its first parameter takes."""

    handler: Callable[..., Any]
    model: type[BaseModel] | None = None
    with_delivery: bool = False
    batch: bool = False

    def __call__(self, job: Delivery | list[Delivery]) -> Any:
        """Call the handler; returns a coroutine where :attr:`is_async`.

        :param job: for a batch handler a list; a single job is a list of one, and its outcome is returned or raised
        :raises InvalidBodyError: the body doesn't validate against the model
        """
        if isinstance(job, list):
            return self.handler(job)
        if self.batch:
            return self._call_async(job) if self.is_async else _only_outcome(self.handler([job]))
        if self.model is None:
            return self.handler(job)
        from pydantic import ValidationError

        try:
            body = self.model.model_validate_json(job.body)
        except ValidationError as error:
            # Not the error's own text, which repeats values of the body.
            raise InvalidBodyError(_validation_text(self.model, error)) from None
        return self.handler(body, job) if self.with_delivery else self.handler(body)

    async def _call_async(self, job: Delivery) -> Any:
        return _only_outcome(await self.handler([job]))

    @property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine."""
        call_method = type(self.handler).__call__
        return inspect.iscoroutinefunction(self.handler) or inspect.iscoroutinefunction(call_method)


class HandlerResult:
    """A context manager that stores the exception raised inside it, or the value assigned to it.

    Handlers run in threads and processes, where nothing catches what they raise. Don't hold it over an ``await``: it
    would swallow the cancellation.
    """

    __slots__ = ("cancelled", "error", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.cancelled = False

    @classmethod
    def of_error(cls, error: BaseException) -> Self:
        """Return the result of a call that raised."""
        result = cls()
        result.error = as_exception(error)
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.error = as_exception(error)
        return True


def outcomes_of(returned: object, count: int) -> Sequence[Any]:
    """Return the outcome of each job of a batch: its result, or the error with which it failed.

    :raises ValueError: the handler returned something else
    """
    if returned is None:
        return [None] * count
    if not isinstance(returned, list | tuple) or len(returned) != count:
        found = f"{len(returned)} of them" if isinstance(returned, list | tuple) else type(returned).__name__
        raise ValueError(f"expected a batch handler to return {count} outcomes, one for each job, found {found}")
    return returned


def _only_outcome(returned: object) -> Any:
    (outcome,) = outcomes_of(returned, 1)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def inspect_batch_handler(handler: Callable[..., Any]) -> Handler:
    """Check that a handler takes a list of deliveries.

    :raises WorkerSetupError: the handler takes something else
    """
    try:
        signature = inspect.signature(handler)
        signature.bind(object())
    except ValueError:
        # Some builtins have no signature.
        return Handler(handler, batch=True)
    except TypeError as error:
        raise WorkerSetupError(
            f"expected a handler that takes a list of jobs, found {_name(handler)}: {error}"
        ) from None
    if (found := _model_of_list(handler, next(iter(signature.parameters.values()), None))) is not None:
        raise WorkerSetupError(
            f"expected a batch handler that takes list[Delivery], found {found} in {_name(handler)}: a body that isn't"
            f" valid has an outcome of its own; validate each with model_validate_json(job.body), and return the error"
            " as its outcome"
        )
    return Handler(handler, batch=True)


def _model_of_list(handler: Callable[..., Any], parameter: inspect.Parameter | None) -> str | None:
    """Return the annotation of a batch handler that takes pydantic models, which no call would fulfil."""
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return None
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            hints = SimpleNamespace(__annotations__={parameter.name: annotation})
            annotation = get_type_hints(hints, globalns=_globals(handler))[parameter.name]
        except (NameError, AttributeError, SyntaxError, TypeError):
            # Imported for type checkers only, as Delivery is in many handlers.
            return None
    from pydantic import BaseModel

    kinds = [annotation, *get_args(annotation)]
    models = [kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None


def inspect_handler(handler: Callable[..., Any]) -> Handler:
    """Read a handler's signature: a :class:`Delivery`, or a pydantic model and, optionally, a delivery.

    :raises WorkerSetupError: the handler takes something else, or an annotation can't be evaluated
    """
    try:
        signature = inspect.signature(handler)
    except (ValueError, TypeError):
        # Some builtins have no signature.
        return Handler(handler)
    positional = [parameter for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL_KINDS]
    model = _body_model(handler, positional[0]) if positional else None
    arguments = (object(),) * (2 if model and len(positional) > 1 else 1)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise WorkerSetupError(
            f"expected a handler that takes a job, or a pydantic model and a job, found {_name(handler)}{signature}:"
            f" {error}"
        ) from None
    return Handler(handler, model, with_delivery=len(arguments) > 1)


def _body_model(handler: Callable[..., Any], parameter: inspect.Parameter) -> type[BaseModel] | None:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            hints = SimpleNamespace(__annotations__={parameter.name: annotation})
            annotation = get_type_hints(hints, globalns=_globals(handler))[parameter.name]
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            # Many handlers import Delivery under TYPE_CHECKING only.
            if annotation.rpartition(".")[2] == "Delivery":
                return None
            raise WorkerSetupError(
                f"expected an annotation that can be read while the worker runs, found {annotation!r} on"
                f" {parameter.name} of {_name(handler)}: {error}; import it outside of TYPE_CHECKING"
            ) from None
    if not isinstance(annotation, type):
        return None
    # A handler's process that takes no models starts without pydantic.
    from pydantic import BaseModel

    return annotation if issubclass(annotation, BaseModel) else None


def _globals(handler: Any) -> dict[str, Any]:
    while isinstance(handler, partial):
        handler = handler.func
    function = inspect.unwrap(handler)
    if not hasattr(function, "__globals__"):
        function = inspect.unwrap(type(function).__call__)
    return getattr(getattr(function, "__func__", function), "__globals__", {})


def _name(handler: Any) -> str:
    return str(getattr(handler, "__qualname__", None) or type(handler).__qualname__)


def as_exception(error: BaseException) -> Exception:
    """Return an exception for whatever a handler has raised."""
    # A future refuses StopIteration, and SystemExit would end the loop with all its jobs instead of failing this one.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"the handler raised {error!r}")
    failure.__cause__ = error
    return failure


def _validation_text(model: type[BaseModel], error: ValidationError) -> str:
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    texts = [
        f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems[:_MAX_PROBLEMS]
    ]
    more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
    return f"expected a body that is a valid {model.__name__}, found: {'; '.join(texts)}{more}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a handler failed.

    ``digest`` is twelve hexadecimal digits; ``place`` is the innermost function of the handler's own code, as
    ``module:function:line``; ``functions`` are those on the way there, the outermost first.
    """

    digest: str
    place: str
    functions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Frame:
    function: str
    line: int
    installed: bool


def failure_of(error: BaseException) -> Failure | None:
    """Return where the handler raised an error; ``None`` where it wasn't running, such as for an invalid body."""
    attached = vars(error).get(_ATTRIBUTE)
    return attached if isinstance(attached, Failure) else _read(error)


def attach_failure(error: BaseException, failure: Failure | None) -> None:
    """Attach the result of :func:`failure_of` to an error that was unpickled without its traceback."""
    vars(error)[_ATTRIBUTE] = failure


def class_name(error_type: type[BaseException]) -> str:
    """Return the name of an error's class, with its module where the class isn't a builtin."""
    module, name = error_type.__module__, error_type.__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def _read(error: BaseException) -> Failure | None:
    errors = list(_error_chain(error))
    frames = [list(_frames(chained.__traceback__)) for chained in errors]
    # The frames of installed packages count where the handler is an installed package itself.
    has_own = any(not frame.installed for trace in frames for frame in trace)
    frames = [[frame for frame in trace if not (has_own and frame.installed)] for trace in frames]
    if not any(frames):
        return None
    lines: dict[str, None] = {}
    for chained, trace in zip(errors, frames, strict=True):
        lines |= dict.fromkeys([f"error {class_name(type(chained))}", *(f"in {frame.function}" for frame in trace)])
    # The last error of the chain that has frames is the root cause; an error that was never raised has none.
    root = [trace for trace in frames if trace][-1]
    digest = sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]
    places = [f"{_ascii(frame.function)}:{frame.line}" for frame in root]
    return Failure(digest, places[-1], tuple(places[-_MAX_FUNCTIONS:]))


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes, and the members of an exception group."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MAX_ERRORS:
        chained = waiting.pop(0)
        if id(chained) in seen:
            continue
        seen.add(id(chained))
        yield chained
        if chained.__cause__ is not None:
            waiting.append(chained.__cause__)
        if isinstance(chained, BaseExceptionGroup):
            # Sorted by name, since the order of a group is the order in which its tasks failed.
            waiting += sorted(chained.exceptions, key=lambda member: class_name(type(member)))


def _frames(traceback: TracebackType | None) -> Iterator[_Frame]:
    while traceback is not None:
        frame, code = traceback.tb_frame, traceback.tb_frame.f_code
        module = str(frame.f_globals.get("__name__", "?"))
        if module.partition(".")[0] not in _IGNORED_MODULES and code.co_name not in _INLINED:
            # The main program has this name in its child processes.
            module = "__main__" if module == "__mp_main__" else module
            installed = not _INSTALLED.isdisjoint(PurePath(code.co_filename).parts)
            yield _Frame(f"{module}:{code.co_qualname}", traceback.tb_lineno, installed)
        traceback = traceback.tb_next


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()[:_MAX_NAME_LENGTH]


def error_text(error: BaseException) -> str:
    """Return an error's text; empty where the ``__str__`` of a handler's own class fails."""
    with suppress(Exception):
        return str(error)
    return ""
