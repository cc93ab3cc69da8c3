"""Bringing dead letters back as jobs with fresh deliveries, so that no crash at any point loses or repeats one."""

from airflow_provider_jetstream.jetstream.redrive.order import Protocol, RedriveOrder
from airflow_provider_jetstream.jetstream.redrive.preview import Preview, preview
from airflow_provider_jetstream.jetstream.redrive.repair import UNCHANGED, Repair, Transform
from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport
from airflow_provider_jetstream.jetstream.redrive.run import redrive

__all__ = [
    "UNCHANGED",
    "Preview",
    "Protocol",
    "RedriveOrder",
    "RedriveReport",
    "Repair",
    "Transform",
    "preview",
    "redrive",
]
