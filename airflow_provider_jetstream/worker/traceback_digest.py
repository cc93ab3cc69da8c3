"""Where a handler failed: a digest by which the same fault is known again, and the place for people.

What varies without the fault being another one doesn't count: line numbers, messages, values, the depth of a recursion,
the functions of the standard library and of installed packages, and whether the handler ran in a task, a thread or a
process. A traceback doesn't go through pickle, so a handler's process reads it there, and sends what it found.
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
_LONGEST_NAME = 200
_MOST_ERRORS = 50

_UNCOUNTED = sys.stdlib_module_names | {__name__.partition(".")[0]}
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# Python 3.12 has no frames for these any more.
_INLINED = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_CARRIED = "_jetstream_failure"


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a handler failed.

    :param digest: twelve hexadecimal digits, the same for the same fault
    :param place: the innermost of the handler's own functions, as ``module:function:line``
    """

    digest: str
    place: str


@dataclass(frozen=True, slots=True)
class _Step:
    function: str
    line: int
    installed: bool


def failure_of(error: BaseException) -> Failure | None:
    """Find out where a handler failed.

    :param error: what it raised
    :return: where; ``None`` where none of its functions was running, such as for a body that no handler was given
    """
    carried = vars(error).get(_CARRIED)
    return carried if isinstance(carried, Failure) else _read(error)


def carry(error: BaseException, failure: Failure | None) -> None:
    """Keep with an error what :func:`failure_of` found where its traceback was.

    :param error: the error as it came out of a process
    :param failure: where the handler failed there
    """
    vars(error)[_CARRIED] = failure


def class_name(kind: type[BaseException]) -> str:
    """Name a type of errors.

    :param kind: the type
    :return: its name with its module, where that isn't Python's own
    """
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _read(error: BaseException) -> Failure | None:
    chain = list(_chain(error))
    steps = [list(_steps(each.__traceback__)) for each in chain]
    # All of them count where the handler is an installed package itself.
    own = any(not step.installed for each in steps for step in each)
    steps = [[step for step in each if not (own and step.installed)] for each in steps]
    if not any(steps):
        return None
    lines: dict[str, None] = {}
    for each, its_steps in zip(chain, steps, strict=True):
        lines |= dict.fromkeys([f"error {class_name(type(each))}", *(f"in {step.function}" for step in its_steps)])
    # The cause of all, as far as it was raised rather than made.
    innermost = [each for each in steps if each][-1][-1]
    digest = sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]
    return Failure(digest, f"{_ascii(innermost.function)}:{innermost.line}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Give an error, what it was raised from, and what it is a group of."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MOST_ERRORS:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if each.__cause__ is not None:
            waiting.append(each.__cause__)
        if isinstance(each, BaseExceptionGroup):
            # In the order of their names, since the order of a group is that in which its tasks failed.
            waiting += sorted(each.exceptions, key=lambda member: class_name(type(member)))


def _steps(traceback: TracebackType | None) -> Iterator[_Step]:
    while traceback is not None:
        frame, code = traceback.tb_frame, traceback.tb_frame.f_code
        module = str(frame.f_globals.get("__name__", "?"))
        if module.partition(".")[0] not in _UNCOUNTED and code.co_name not in _INLINED:
            # What is run as a program has this name in the processes that it starts.
            module = "__main__" if module == "__mp_main__" else module
            installed = not _INSTALLED.isdisjoint(PurePath(code.co_filename).parts)
            yield _Step(f"{module}:{code.co_qualname}", traceback.tb_lineno, installed)
        traceback = traceback.tb_next


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()[:_LONGEST_NAME]
