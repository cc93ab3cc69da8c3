"""What Airflow discovers of this package."""

from __future__ import annotations

from typing import Any

from airflow_provider_jetstream import __version__

_PACKAGE = "airflow_provider_jetstream"


def get_provider_info() -> dict[str, Any]:
    """Describe the provider to Airflow.

    :return: the provider information, as Airflow's ``provider_info.schema.json`` has it
    """
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
                "tags": ["service"],
            }
        ],
        "hooks": [{"integration-name": "NATS JetStream", "python-modules": [f"{_PACKAGE}.hooks.jetstream"]}],
        "operators": [
            {
                "integration-name": "NATS JetStream",
                "python-modules": [f"{_PACKAGE}.operators.{name}" for name in ("provision", "publish", "redrive")],
            }
        ],
        "sensors": [
            {
                "integration-name": "NATS JetStream",
                "python-modules": [f"{_PACKAGE}.sensors.{name}" for name in ("dead_letter", "queue")],
            }
        ],
        "triggers": [
            {
                "integration-name": "NATS JetStream",
                "python-modules": [f"{_PACKAGE}.triggers.{name}" for name in ("completion", "dead_letter", "queue")],
            }
        ],
        "connection-types": [
            {
                "connection-type": "nats",
                "hook-class-name": f"{_PACKAGE}.hooks.jetstream.JetStreamHook",
                "hook-name": "NATS JetStream",
                "ui-field-behaviour": {
                    "hidden-fields": ["schema", "extra"],
                    "relabeling": {"host": "Servers", "login": "User"},
                    "placeholders": {
                        "host": "nats-1.example.org, nats-2.example.org (tls://… for TLS)",
                        "port": "4222",
                    },
                },
                "conn-fields": {
                    "token": {
                        "label": "Token",
                        "description": "Instead of user and password.",
                        "schema": {"type": ["string", "null"], "format": "password"},
                    },
                    "tls_ca_file": {
                        "label": "TLS CA file",
                        "description": "Path of the authority that signed the servers' certificates.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "timeout": {
                        "label": "Timeout in seconds",
                        "description": "For connecting as a whole, and for each request.",
                        "schema": {"type": ["number", "null"], "minimum": 0.1, "maximum": 300, "default": 10},
                    },
                },
            }
        ],
    }
