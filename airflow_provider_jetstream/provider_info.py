"""The provider information that Airflow discovers."""

from __future__ import annotations

from typing import Any

from airflow_provider_jetstream import __version__
from airflow_provider_jetstream.connection_form import CONNECTION_FIELDS, FIELD_BEHAVIOUR

_PACKAGE = "airflow_provider_jetstream"


def get_provider_info() -> dict[str, Any]:
    """Return the provider information in the form of Airflow's ``provider_info.schema.json``."""
    return {
        # Airflow compares this with the distribution's canonical name: underscores here break every airflow command.
        "package-name": "airflow-provider-jetstream",
        "name": "NATS JetStream",
        "description": "Work queues on NATS JetStream, and their dead letters.",
        "versions": [__version__],
        "integrations": [
            {
                "integration-name": "NATS JetStream",
                "external-doc-url": "https://docs.nats.io/nats-concepts/jetstream",
                "how-to-guide": [
                    f"/docs/{page}.md"
                    for page in ("queue", "publishing", "waiting", "draining", "dead-letters", "redrive", "assets")
                ],
                # Where the plugin serves it.
                "logo": "/jetstream/static/icon.svg",
                "tags": ["service"],
            }
        ],
        "hooks": [{"integration-name": "NATS JetStream", "python-modules": [f"{_PACKAGE}.hooks.jetstream"]}],
        "operators": [
            {
                "integration-name": "NATS JetStream",
                "python-modules": [
                    f"{_PACKAGE}.operators.{name}"
                    for name in ("cancel", "consume", "provision", "publish", "redrive", "spark")
                ],
            }
        ],
        "sensors": [
            {
                "integration-name": "NATS JetStream",
                "python-modules": [f"{_PACKAGE}.sensors.{name}" for name in ("dead_letter", "jobs", "queue")],
            }
        ],
        "triggers": [
            {
                "integration-name": "NATS JetStream",
                "python-modules": [
                    f"{_PACKAGE}.triggers.{name}"
                    for name in ("completion", "dead_letter", "message", "queue", "redrive", "waiting_messages")
                ],
            }
        ],
        "asset-uris": [
            {
                "schemes": ["jetstream"],
                "handler": f"{_PACKAGE}.assets.stream_asset.sanitize_uri",
                "factory": f"{_PACKAGE}.assets.stream_asset.create_asset",
                "to_openlineage_converter": f"{_PACKAGE}.assets.stream_asset.convert_asset_to_openlineage",
            }
        ],
        "queues": [f"{_PACKAGE}.queues.jetstream.JetStreamMessageQueueProvider"],
        "task-decorators": [
            {
                "name": "jetstream_consume",
                "class-name": f"{_PACKAGE}.operators.consume.jetstream_consume_task",
            }
        ],
        "notifications": [f"{_PACKAGE}.notifications.jetstream.JetStreamNotifier"],
        "extra-links": [
            f"{_PACKAGE}.links.monitor.{name}"
            for name in ("QueueLink", "TaskJobsLink", "TaskLettersLink", "JobReportsLink", "DeadLetterReportLink")
        ],
        "config": {
            "jetstream": {
                "description": "The page that shows NATS JetStream work queues in Airflow's UI.",
                "options": {
                    "monitor_connections": _option(
                        "string",
                        "nats_default",
                        "Ids of the Airflow connections of type nats whose servers are shown, with commas between"
                        " them. Airflow can't list connections that come from the environment, so they are named here.",
                    ),
                    "monitor_refresh_seconds": _option(
                        "float", "3", "Seconds between two polls of a server while the page is open."
                    ),
                    "monitor_payloads": _option(
                        "string",
                        "acting",
                        "Who sees bodies and headers of jobs, and texts that may quote them: all users of the page,"
                        " acting for those who may trigger the DAG that redrives, or none.",
                    ),
                    "monitor_payload_bytes": _option("integer", "65536", "Bytes of a body that are shown."),
                    "monitor_redrive_dag": _option(
                        "string", "jetstream_redrive", "The DAG that the page triggers to redrive dead letters."
                    ),
                },
            }
        },
        "connection-types": [
            {
                "connection-type": "nats",
                "hook-class-name": f"{_PACKAGE}.hooks.jetstream.JetStreamHook",
                "hook-name": "NATS JetStream",
                "ui-field-behaviour": FIELD_BEHAVIOUR,
                "conn-fields": CONNECTION_FIELDS,
            }
        ],
    }


def _option(kind: str, default: str, description: str) -> dict[str, Any]:
    return {"description": description, "version_added": __version__, "type": kind, "example": None, "default": default}
