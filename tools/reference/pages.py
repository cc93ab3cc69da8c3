"""The pages of docs/reference, and what they lack."""

from __future__ import annotations

from pathlib import Path

from tools.reference.api_pages import airflow_entries, airflow_page, api_links, api_pages, entry_page
from tools.reference.command_pages import command_page, command_problems, parsers
from tools.reference.error_page import error_links, error_page, error_problems
from tools.reference.evidence_page import evidence_page
from tools.reference.hook_page import hook_page, hook_problems
from tools.reference.metric_page import metric_page, metric_problems
from tools.reference.permission_page import permission_page
from tools.reference.queue_page import field_problems, queue_page
from tools.reference.server_field_page import server_field_page
from tools.reference.spark_page import option_problems, spark_page

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "reference"
_NOTE = "<!-- Made from the code by `make reference`: change the docstrings there. -->"


def reference_pages() -> dict[str, str]:
    """Return the text of each page by its file's name."""
    links = reference_links()
    pages = {page.file: entry_page(page, links) for page in api_pages()}
    pages |= {"airflow.md": airflow_page(links), "hook.md": hook_page(links), "queue-fields.md": queue_page(links)}
    pages |= {"errors.md": error_page(links), "metrics.md": metric_page(), "spark-options.md": spark_page()}
    pages |= {"permissions.md": permission_page(), "server-fields.md": server_field_page()}
    pages["evidence.md"] = evidence_page()
    pages |= {file: command_page(file) for file in parsers()}
    return {file: f"{_NOTE}\n\n{text}\n" for file, text in pages.items()}


def reference_links() -> dict[str, str]:
    """Return where each public name is described, as ``page.md#anchor``."""
    return api_links() | error_links()


def reference_problems() -> list[str]:
    """Return what has no description, type or meaning."""
    entries = [*airflow_entries(), *(entry for page in api_pages() for entry in page.entries)]
    return [
        *(problem for entry in entries for problem in entry.problems),
        *hook_problems(),
        *field_problems(),
        *error_problems(),
        *metric_problems(),
        *command_problems(),
        *option_problems(),
    ]
