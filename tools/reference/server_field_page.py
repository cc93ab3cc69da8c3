"""The page about every field that the server reports of streams and consumers, from the table that judges them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.queue.finding import Refusal
from airflow_provider_jetstream.jetstream.queue.server_fields import CONSUMER_FIELDS, STREAM_FIELDS, field_rules
from tools.reference.markdown import code, heading, join, table

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.queue.field_rules import Rule
    from airflow_provider_jetstream.jetstream.queue.server_fields import Field

_INTRO = (
    "What STREAM.INFO and CONSUMER.INFO report, up to nats-server 2.15 (API level 5), and what each field does to the"
    " jobs of a queue. Any tool may set them. A *harmless* field is kept as it is, a *named* one is"
    " said with its sentence, a *refused* one stops who would work with it. A field of a newer server that isn't here,"
    ' and has a value, is named as <a id="unknown-field"></a>`unknown-field`.'
)
_USES = (
    "*plan*: `plan` and `provision`, where what is refused blocks the step and what is named is a note of it; *lint*:"
    " warnings of a declaration and of a running queue; *worker*: the start of a worker, which refuses or logs a"
    " warning; *scan*: scans, waits, redrives and diagnoses, in their risks. The names stay the same between releases."
    " The sentences are those about the queue `q` with consumer `w`."
)
_KINDS = {"dead_letters": "dead letter queue", "queue": "queue", "consumer": "consumer"}


def server_field_page() -> str:
    """Return the page."""
    seen: set[str] = set()
    return join(
        [
            heading(1, "Fields of the server"),
            _INTRO,
            _USES,
            heading(2, "Of a stream"),
            _rows(STREAM_FIELDS, seen),
            heading(2, "Of a consumer"),
            _rows(CONSUMER_FIELDS, seen),
        ]
    )


def _rows(fields: tuple[Field, ...], seen: set[str]) -> str:
    return table(
        ("field", "level", "what it is", "what follows"),
        [
            (
                code(field.path),
                str(field.level or ""),
                field.means,
                "<br>".join(_says(rule, seen) for rule in field_rules(fields, field.path)) or "harmless",
            )
            for field in fields
        ],
    )


def _says(rule: Rule, seen: set[str]) -> str:
    anchor = "" if rule.name in seen else f'<a id="{rule.name}"></a>'
    seen.add(rule.name)
    verdict = "refused" if rule.effect is Refusal else "named"
    uses = ", ".join(use for use in ("plan", "lint", "worker", "scan") if use in rule.uses)
    kind = _KINDS.get(rule.kind, rule.kind)
    return f"{anchor}**{verdict}** {code(rule.name)} ({kind}; {uses}): {rule.of_example()}"
