"""Dead letters: told of or not, proved, kept, and chosen among."""

from airflow_provider_jetstream.jetstream.dead_letters.capture import Keeper
from airflow_provider_jetstream.jetstream.dead_letters.findings import Findings, find_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.letter import DeadLetter, Source
from airflow_provider_jetstream.jetstream.dead_letters.premises import Premises
from airflow_provider_jetstream.jetstream.dead_letters.proof import Dismissal, Verdict
from airflow_provider_jetstream.jetstream.dead_letters.scan import Page, Scan, require_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.selection import GroupField, Selection, group_of
from airflow_provider_jetstream.jetstream.death import Death, Reason

__all__ = [
    "DeadLetter",
    "Death",
    "Dismissal",
    "Findings",
    "GroupField",
    "Keeper",
    "Page",
    "Premises",
    "Reason",
    "Scan",
    "Selection",
    "Source",
    "Verdict",
    "find_dead_letters",
    "group_of",
    "require_dead_letters",
]
