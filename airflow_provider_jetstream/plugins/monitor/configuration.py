"""What can be set about the page, in Airflow's configuration under ``[jetstream]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from airflow.providers.common.compat.sdk import AirflowConfigException, conf

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook

Payloads: TypeAlias = Literal["all", "acting", "none"]

SECTION = "jetstream"
REDRIVE_DAG = "jetstream_redrive"
_LEAST_REFRESH = 0.5
_MOST_PAYLOAD = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """What is set about the page.

    :param connections: ids of the Airflow connections that are shown
    :param refresh: seconds between two looks at a server
    :param payloads: who sees the bodies and headers of jobs
    :param payload_bytes: how much of a body is shown
    :param redrive_dag: the DAG that redrives
    """

    connections: tuple[str, ...]
    refresh: float
    payloads: Payloads
    payload_bytes: int
    redrive_dag: str


def monitor_settings() -> MonitorSettings:
    """Read the configuration.

    :return: what is set
    :raises AirflowConfigException: a value can't be used
    """
    # The fallbacks are those of provider_info: the API server may ask before it has discovered providers.
    text = conf.get(SECTION, "monitor_connections", fallback=JetStreamHook.default_conn_name)
    connections = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    payloads: str = conf.get(SECTION, "monitor_payloads", fallback="all")
    chosen: dict[str, Payloads] = {each: each for each in get_args(Payloads)}
    if not connections:
        raise _refused("monitor_connections", "ids of connections, with commas between them", text)
    if payloads not in chosen:
        raise _refused("monitor_payloads", f"one of {', '.join(chosen)}", payloads)
    return MonitorSettings(
        connections=connections,
        refresh=max(_LEAST_REFRESH, conf.getfloat(SECTION, "monitor_refresh_seconds", fallback=3.0)),
        payloads=chosen[payloads],
        payload_bytes=min(_MOST_PAYLOAD, max(1, conf.getint(SECTION, "monitor_payload_bytes", fallback=65_536))),
        redrive_dag=conf.get(SECTION, "monitor_redrive_dag", fallback=REDRIVE_DAG),
    )


def _refused(option: str, expected: str, found: str) -> AirflowConfigException:
    return AirflowConfigException(f"[{SECTION}] {option}: expected {expected}, found {found!r}; correct it")
