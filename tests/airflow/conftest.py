"""A real Airflow with real servers behind its connections, which all hold secrets."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING

import pytest
from airflow_steps import ROOT, Secrets, provisioned, task_states, wait_for
from dags.refused_tasks import WITHOUT_LETTERS
from planted_connections import PlantedConnections, planted_connections

from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue, connection_settings
from testbed.airflow import Airflow
from testbed.nats_server import NatsServer
from testbed.planted_secrets import planted
from testbed.ports import LOOPBACK, free_port
from testbed.received_stats import ReceivedGauges, received_statsd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


REFUSED_RUN = "refused"


@pytest.fixture(scope="session")
def secrets() -> Secrets:
    return Secrets(*(planted(name, plain=True) for name in ("pw", "tok", "badpw", "badtok", "inhost", "inextra")))


@pytest.fixture(scope="session")
def planted_ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedConnections]:
    """Connections with a secret in every field."""
    with planted_connections(tmp_path_factory.mktemp("planted")) as connections:
        yield connections


@pytest.fixture(scope="session")
def nats(secrets: Secrets) -> Iterator[NatsServer]:
    """The server of these tests instead of the one of all other tests: the example DAGs' streams have fixed names."""
    with NatsServer(user="airflow", password=secrets.password) as server:
        yield server


@pytest.fixture(scope="session")
def settings(nats: NatsServer, secrets: Secrets) -> ConnectionSettings:
    return connection_settings({"servers": (nats.url,), "user": "airflow", "password": secrets.password, "timeout": 20})


@pytest.fixture(scope="session")
def token_nats(secrets: Secrets) -> Iterator[NatsServer]:
    with NatsServer(token=secrets.token) as server:
        yield server


@pytest.fixture(scope="session")
def bare_nats() -> Iterator[NatsServer]:
    """A server without JetStream."""
    with NatsServer(jetstream=False) as server:
        yield server


@pytest.fixture(scope="session")
def fleet_nats() -> Iterator[NatsServer]:
    """A server that only the monitor's tests use."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def spark_events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Spark's event logs."""
    return tmp_path_factory.mktemp("spark_events")


@pytest.fixture(scope="session")
def spark_conf(spark_events: Path) -> dict[str, str]:
    """Properties of every application: little to start, since each does little."""
    return {
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.host": LOOPBACK,
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": spark_events.as_uri(),
        "spark.eventLog.enabled": "true",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }


@pytest.fixture(scope="session")
def connections(
    nats: NatsServer,
    token_nats: NatsServer,
    bare_nats: NatsServer,
    fleet_nats: NatsServer,
    secrets: Secrets,
    planted_ways: PlantedConnections,
    spark_conf: dict[str, str],
) -> dict[str, dict[str, object]]:
    """Every connection of the tests by its id, as Airflow takes them in JSON form."""
    good = {"conn_type": "nats", "host": LOOPBACK, "port": nats.port, "login": "airflow", "password": secrets.password}
    token = {"conn_type": "nats", "host": LOOPBACK, "port": token_nats.port}
    return {
        "nats_default": good,
        "nats_token": token | {"extra": {"token": secrets.token, "timeout": 5}},
        "nats_wrong_password": good | {"password": secrets.wrong_password},
        "nats_wrong_token": token | {"extra": {"token": secrets.wrong_token}},
        "nats_unreachable": good | {"port": free_port()},
        "nats_without_jetstream": good | {"port": bare_nats.port},
        "nats_fleet": {"conn_type": "nats", "host": LOOPBACK, "port": fleet_nats.port},
        "nats_without_tls": good | {"host": f"tls://{LOOPBACK}"},
        "nats_secret_in_host": good | {"host": f"nats://airflow:{secrets.in_host}@{LOOPBACK}"},
        "nats_unknown_extra": good | {"extra": {"tokn": secrets.in_extra}},
        "nats_two_ways": good | {"extra": {"token": secrets.token}},
        **planted_ways.connections,
        "spark_default": {"conn_type": "spark", "host": "local[2]", "extra": {"conf": spark_conf}},
        "spark_unreachable": {"conn_type": "spark", "host": f"spark://{LOOPBACK}", "port": free_port()},
    }


@pytest.fixture(scope="session")
def stats() -> Iterator[ReceivedGauges]:
    """What Airflow sends to StatsD."""
    with received_statsd() as gauges:
        yield gauges


@pytest.fixture(scope="session")
def event_orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which the DAG ``orders_by_event`` records the orders that it did."""
    return tmp_path_factory.mktemp("event_orders") / "ledger.jsonl"


@pytest.fixture(scope="session")
def airflow(
    request: pytest.FixtureRequest,
    settings: ConnectionSettings,
    stats: ReceivedGauges,
    connections: dict[str, dict[str, object]],
    planted_ways: PlantedConnections,
    event_orders: Path,
    tmp_path_factory: pytest.TempPathFactory,
    migrated_databases: Path,
) -> Iterator[Airflow]:
    """One Airflow for all tests, with the example DAGs and the tests' own.

    The DAG ``refusing`` has many tasks, and no test interferes with them: its run starts at once if a test needs it.
    """
    folder = tmp_path_factory.mktemp("airflow")
    # Parsing some forty files takes half of Airflow's start, and what `make test` shows needs one of them.
    every = any(map(_needs_all_dags, request.session.items))
    left_out = None if every else _all_but_orders
    shutil.copytree(ROOT / "example_dags", folder / "dags" / "example_dags", ignore=left_out)
    if every:
        shutil.copytree(ROOT / "tests" / "airflow" / "dags", folder / "dags" / "tests")
    instance = Airflow(
        folder / "home",
        folder / "dags",
        connections={name: json.dumps(connection) for name, connection in connections.items()},
        # Enough for many mapped tasks to run, defer and resume at the same time.
        parallelism=16,
        template_db=migrated_databases,
        env={
            # Parsing so many files again each minute takes half a core; one that changes is parsed at once.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
            # A deferred task resumes only after this time, since the trigger's event is delayed by it.
            "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.3",
            # A thousand triggers of one test run beside those that others leave.
            "AIRFLOW__TRIGGERER__CAPACITY": "1200",
            "PLANTED_FAILING": ",".join(planted_ways.failing()),
            "EVENT_ORDERS_LEDGER": str(event_orders),
            "DEAD_LETTER_REPORTS": str(folder / "reports"),
            "PAYLOAD_ORDERS_LEDGER": str(folder / "payload_orders.jsonl"),
            "AIRFLOW__JETSTREAM__MONITOR_CONNECTIONS": "nats_default,nats_fleet,nats_unreachable,nats_wrong_password",
            "AIRFLOW__JETSTREAM__MONITOR_REFRESH_SECONDS": "1",
            "AIRFLOW__METRICS__STATSD_ON": "True",
            "AIRFLOW__METRICS__STATSD_HOST": LOOPBACK,
            "AIRFLOW__METRICS__STATSD_PORT": str(stats.port),
            "AIRFLOW__JETSTREAM__MONITOR_PAYLOADS": "acting",
            # A triggerer that was killed is declared dead after 4 seconds.
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
            "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "4",
        },
    )
    with instance:
        if any("refused" in getattr(item, "fixturenames", ()) for item in request.session.items):
            asyncio.run(provisioned(settings, WorkQueue.load(WITHOUT_LETTERS)))
            instance.wait_for_dags("refusing")
            instance.trigger("refusing", run_id=REFUSED_RUN)
        yield instance


def _needs_all_dags(item: pytest.Item) -> bool:
    return "airflow" in getattr(item, "fixturenames", ()) and item.get_closest_marker("smoke") is None


def _all_but_orders(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".py") and name != "orders.py"]


@pytest.fixture(scope="session")
def refused(airflow: Airflow) -> str:
    """The ended run of the DAG whose tasks all fail."""
    ended = {"failed", "up_for_retry"}
    wait_for(
        lambda: {str(state) for state in task_states(airflow, "refusing", REFUSED_RUN).values()} <= ended,
        "every task of the DAG refusing to fail",
        timeout=180,
    )
    return REFUSED_RUN


@pytest.fixture
def own_connections(connections: dict[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same connections in this process."""
    for name, connection in connections.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(connection))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """The file in which workers record their jobs."""
    return tmp_path / "ledger.jsonl"
