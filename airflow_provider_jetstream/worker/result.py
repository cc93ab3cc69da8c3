"""Keeping what a call returned or raised, to be handed to somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType


class Outcome:
    """Keeps whatever is raised inside it, or that it was cancelled.

    Not to be held over an ``await``, whose cancellation it would swallow. Handlers run where nobody could catch what
    they raise: in threads and in processes of their own.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None
        self.cancelled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.error = _portable(error)
        return True


def _portable(error: BaseException) -> Exception:
    # A future refuses StopIteration, and an exit would end the loop with all its jobs instead of failing this one.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"the handler raised {error!r}")
    failure.__cause__ = error
    return failure
