"""A warning of the lint: a sentence with a stable name, under which the documentation explains the rule."""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.queue.finding import Finding

_RULES = "docs/queue.md"


class QueueWarning(Finding):
    """A sentence about a setting that works and will cause trouble later, or about a queue that runs into some.

    :param name: stays the same between releases, such as ``long-ack-wait``
    """

    __slots__ = ()

    @property
    def rule(self) -> str:
        """The place in the documentation that explains the rule."""
        return f"{_RULES}#{self.name}"
