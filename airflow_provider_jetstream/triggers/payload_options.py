"""The arguments of the message trigger in the mode ``payload``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self, get_args

from airflow_provider_jetstream.jetstream.errors import ArgumentError
from airflow_provider_jetstream.jetstream.units import parse_seconds, parse_size
from airflow_provider_jetstream.triggers.message_event import BodyForm

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_IN_A_BATCH = 10_000
_LONGEST_WAIT = 300.0


@dataclass(frozen=True, slots=True)
class PayloadOptions:
    """How messages become events in the mode ``payload``.

    :param batch_size: how many messages are requested at once
    :param max_wait: how long a request for messages waits for them, in seconds or as text; a message is passed on at
        once, and whether there are more is asked again after this time
    :param body: ``text`` passes every body on, as UTF-8 or else as Base64; ``json`` passes on the value of a body that
        is JSON, and any other message becomes a dead letter
    :param max_size: the largest message, headers included, that an event contains, in bytes or as text; of a larger one
        the event says where the queue's archive has it, and without a copy there it becomes a dead letter
    """

    batch_size: int = 100
    max_wait: float = 5.0
    body: BodyForm = "text"
    max_size: int = 64 << 10

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Check arguments.

        :raises ArgumentError: one isn't known, or can't be used
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(values.keys() - set(names)):
            raise ArgumentError(
                f"expected arguments among {', '.join(names)} for the mode payload, found {', '.join(unknown)}:"
                " remove or correct them"
            )
        try:
            options = cls(
                **{
                    **values,
                    "max_wait": parse_seconds(values.get("max_wait", cls().max_wait)),
                    "max_size": parse_size(values.get("max_size", cls().max_size)),
                }
            )
        except ValueError as error:
            raise ArgumentError(f"max_wait or max_size of the mode payload: {error}") from None
        batch, size = options.batch_size, options.max_size
        if not isinstance(batch, int) or isinstance(batch, bool) or not 0 < batch <= _MOST_IN_A_BATCH:
            raise ArgumentError(f"expected 1 to {_MOST_IN_A_BATCH} as batch_size, found {batch!r}: correct it")
        if not 0 < options.max_wait <= _LONGEST_WAIT:
            raise ArgumentError(
                f"expected more than 0 and at most {_LONGEST_WAIT:g} seconds as max_wait, found {options.max_wait:g}:"
                " correct it"
            )
        if size < 1:
            raise ArgumentError(f"expected at least 1 byte as max_size, found {size}: events have no unlimited size")
        if options.body not in get_args(BodyForm):
            raise ArgumentError(f"expected {' or '.join(get_args(BodyForm))} as body, found {options.body!r}")
        return options

    def as_json(self) -> dict[str, Any]:
        """Return the arguments."""
        return asdict(self)
