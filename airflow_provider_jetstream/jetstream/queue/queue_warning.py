"""A warning of the lint: a sentence with a stable name, under which the documentation explains the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from airflow_provider_jetstream.jetstream.queue.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

_RULES = "docs/queue-warnings.md"
_FIELDS = "docs/reference/server-fields.md"


class QueueWarning(Finding):
    """A sentence about a setting that works and will cause trouble later, or about a queue that runs into some.

    :param name: stays the same between releases, such as ``long-ack-wait``
    """

    __slots__ = ()

    @property
    def rule(self) -> str:
        """The place in the documentation that explains the rule."""
        # A declaration is checked by modules that warn too, and only a warning that is shown says where its rule is.
        from airflow_provider_jetstream.jetstream.queue.field_rules import RULES

        is_of_field = self.name == "unknown-field" or any(rule.name == self.name for rule in RULES)
        return f"{_FIELDS if is_of_field else _RULES}#{self.name}"

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> list[Self]:
        """Return findings about fields as warnings."""
        return [cls(finding.name, str(finding)) for finding in findings]
