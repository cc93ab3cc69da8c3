"""The page about what counts as evidence, from the table by which every reader judges a stored message."""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.evidence import TABLE
from tools.reference.markdown import code, heading, join, table

_INTRO = (
    "What is stored on a subject proves nothing by its subject alone"
    " ([why](../../SECURITY.md#answers-as-evidence)). Every reader judges a message by this table, and passes by others"
    " to the last one before that counts. Never evidence: an empty body, a PubAck, a refusal, an answer of the API or"
    " of a service, a status of a pull request, an answer to a direct get (header `Nats-Stream`), what the server made"
    " of a schedule (header `Nats-Scheduler`)."
)


def evidence_page() -> str:
    """Return the page."""
    rows = ((code(row.subject), row.stream, row.writers, row.body) for row in TABLE)
    return join([heading(1, "Evidence"), _INTRO, table(("subject", "stored in", "written by", "has to be"), rows)])
