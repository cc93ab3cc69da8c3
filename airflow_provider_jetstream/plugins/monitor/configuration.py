"""The page's options in Airflow's configuration, section ``[jetstream]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from airflow_provider_jetstream.airflow_compat import AirflowConfigException, conf
from airflow_provider_jetstream.hooks.jetstream import JetStreamHook

PayloadAccess: TypeAlias = Literal["all", "acting", "none"]

SECTION = "jetstream"
REDRIVE_DAG = "jetstream_redrive"
_SHORTEST_REFRESH = 0.5
_MAX_PAYLOAD = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """The page's settings.

    :param connections: ids of the Airflow connections that are shown
    :param refresh: seconds from the start of one poll of a server to the next
    :param payloads: who may see the bodies and headers of jobs
    :param payload_bytes: how much of a body is shown
    :param redrive_dag: the DAG that redrives
    """

    connections: tuple[str, ...]
    refresh: float
    payloads: PayloadAccess
    payload_bytes: int
    redrive_dag: str


def monitor_settings() -> MonitorSettings:
    """Read the configuration.

    :raises AirflowConfigException: a value can't be used
    """
    # The fallbacks are those of provider_info: the API server may read them before it has discovered providers.
    text = conf.get(SECTION, "monitor_connections", fallback=JetStreamHook.default_conn_name)
    connections = tuple(dict.fromkeys(conn_id.strip() for conn_id in text.split(",") if conn_id.strip()))
    payloads: str = conf.get(SECTION, "monitor_payloads", fallback="acting")
    choices: dict[str, PayloadAccess] = {choice: choice for choice in get_args(PayloadAccess)}
    if not connections:
        raise _invalid("monitor_connections", "ids of connections, with commas between them", text)
    if payloads not in choices:
        raise _invalid("monitor_payloads", f"one of {', '.join(choices)}", payloads)
    return MonitorSettings(
        connections=connections,
        refresh=max(_SHORTEST_REFRESH, conf.getfloat(SECTION, "monitor_refresh_seconds", fallback=3.0)),
        payloads=choices[payloads],
        payload_bytes=min(_MAX_PAYLOAD, max(1, conf.getint(SECTION, "monitor_payload_bytes", fallback=65_536))),
        redrive_dag=conf.get(SECTION, "monitor_redrive_dag", fallback=REDRIVE_DAG),
    )


def _invalid(option: str, expected: str, found: str) -> AirflowConfigException:
    return AirflowConfigException(f"[{SECTION}] {option}: expected {expected}, found {found!r}; correct it")
