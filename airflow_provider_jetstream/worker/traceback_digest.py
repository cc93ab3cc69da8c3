"""Where a handler failed: a digest that is equal for equal faults, and the place in the code for people.

The digest leaves out what varies between two failures of one fault: line numbers, messages, values, the depth of a
recursion, the functions of the standard library and of installed packages, and whether the handler ran in a task, a
thread or a process. A traceback can't be pickled, so a handler's process computes the digest and sends it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_DIGITS = 12
_MAX_NAME_LENGTH = 200
_MAX_ERRORS = 50

_IGNORED_MODULES = sys.stdlib_module_names | {__name__.partition(".")[0]}
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# Comprehensions: since Python 3.12 they have no frames.
_INLINED = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_ATTRIBUTE = "_jetstream_failure"


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a handler failed.

    ``digest`` is twelve hexadecimal digits; ``place`` is the innermost function of the handler's own code, as
    ``module:function:line``.
    """

    digest: str
    place: str


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
    innermost = [trace for trace in frames if trace][-1][-1]
    digest = sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]
    return Failure(digest, f"{_ascii(innermost.function)}:{innermost.line}")


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
