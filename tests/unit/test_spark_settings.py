"""Airflow's connections converted to the settings of Spark and of its executors, without Spark."""

from __future__ import annotations

import json
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
from airflow_provider_jetstream.jetstream.errors import SelectionError
from airflow_provider_jetstream.spark.application.messages import error_message, require_pyspark
from airflow_provider_jetstream.spark.errors import SparkSettingsError
from airflow_provider_jetstream.tasks.spark import SparkSettings, executor_credentials, spark_settings

if TYPE_CHECKING:
    from collections.abc import Callable

_SECRET = "pl4nted-s3cret"
LOCAL = SparkSettings("local[*]", {})
CLUSTER = SparkSettings("spark://master:7077", {})


def nats(**values: Any) -> ConnectionSettings:
    return ConnectionSettings(servers=("nats://nats-1:4222",), **values)


def with_options(spark: SparkSettings, **options: str) -> SparkSettings:
    return SparkSettings(spark.master, {f"spark.jetstream.{name}": value for name, value in options.items()})


WITH_SECRET = nats(user="u", password=_SECRET)


@pytest.fixture
def set_connection(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_variable(conn_id: str = "spark_default", **connection: Any) -> None:
        monkeypatch.setenv(
            f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps({"conn_type": "spark", "host": "local[2]", **connection})
        )

    return set_variable


@pytest.mark.since_airflow("3.2", "lookups of connections outside a task's process")
def test_without_a_connection_spark_runs_on_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert spark_settings("spark_default", {"spark.ui.enabled": False}) == SparkSettings(
            "local[*]", {"spark.ui.enabled": "false"}
        )
    assert "There is no Airflow connection spark_default, so Spark runs on this machine" in caplog.text


@pytest.mark.since_airflow("3.2", "lookups of connections outside a task's process")
def test_a_named_connection_must_exist() -> None:
    with pytest.raises(
        SparkSettingsError, match="expected an Airflow connection 'spark_big' of type spark, found none"
    ):
        spark_settings("spark_big")


@pytest.mark.parametrize(
    ("connection", "master"),
    [
        ({"host": "local"}, "local"),
        ({"host": "local[2,4]"}, "local[2,4]"),
        ({"host": "spark://master", "port": 7077}, "spark://master:7077"),
        ({"host": "master", "port": 7077}, "spark://master:7077"),
        ({"host": "spark://a:1,b:2"}, "spark://a:1,b:2"),
        ({"host": "yarn"}, "yarn"),
        ({"host": "k8s://https://api", "port": 6443}, "k8s://https://api:6443"),
    ],
)
def test_the_host_is_the_master(set_connection: Callable[..., None], connection: dict[str, Any], master: str) -> None:
    set_connection(**connection)
    assert spark_settings("spark_default").master == master


def test_extras_are_those_of_the_spark_provider_and_properties(set_connection: Callable[..., None]) -> None:
    extra = {
        "deploy-mode": "client",
        "spark-binary": "spark-submit",
        "queue": "nightly",
        "namespace": "",
        "conf": {"spark.executor.memory": "2g", "spark.executor.cores": 2},
        "spark.speculation": True,
    }
    set_connection(extra=extra)
    assert spark_settings("spark_default", '{"spark.executor.cores": 4}').conf == {
        "spark.yarn.queue": "nightly",
        "spark.executor.memory": "2g",
        "spark.executor.cores": "4",
        "spark.speculation": "true",
    }


@pytest.mark.parametrize(
    ("connection", "conf", "message"),
    [
        ({"conn_type": "spark_connect"}, None, "expected the type spark, found 'spark_connect'"),
        ({"host": ""}, None, "expected a master as host, such as"),
        ({"host": "sparc://master"}, None, "found 'sparc://master': correct its host"),
        ({"host": "sc://connect:15002"}, None, "found 'sc://connect:15002'"),
        ({"host": f"spark://u:{_SECRET}@master:7077"}, None, "found an @ in its host"),
        ({"extra": {"deploy-mode": "cluster"}}, None, "expected deploy-mode client, found 'cluster'"),
        ({"extra": {"quue": _SECRET}}, None, "found quue; remove or correct them"),
        ({"extra": {"conf": "local"}}, None, "conf: expected properties such as"),
        ({"extra": {"conf": {"executor.memory": "1g"}}}, None, "expected a property of Spark, spark.…, found 'exec"),
        ({}, {"spark.master": "local"}, "expected no spark.master, which is set from the connection's host"),
        ({}, "nothing", "spark_conf: expected properties such as"),
    ],
)
def test_invalid_settings_are_refused(
    set_connection: Callable[..., None], connection: dict[str, Any], conf: Any, message: str
) -> None:
    set_connection(**connection)
    with pytest.raises(SparkSettingsError) as refused:
        spark_settings("spark_default", conf)
    assert message in str(refused.value)
    assert _SECRET not in str(refused.value)


def test_a_cluster_gets_options_without_secrets() -> None:
    credentials = executor_credentials(nats(tls_ca_file="/ca.pem", timeout=5), CLUSTER)
    assert credentials.options == {"servers": "nats://nats-1:4222", "tlsCaFile": "/ca.pem", "timeout": "5"}
    assert credentials.environment == {}


def test_a_cluster_gets_no_secret() -> None:
    with pytest.raises(SparkSettingsError, match="how executors of spark://master") as refused:
        executor_credentials(WITH_SECRET, CLUSTER)
    assert _SECRET not in str(refused.value)


@pytest.mark.parametrize("option", ["password", "token", "nkeySeedSecret", "credentialsSecret"])
def test_a_secret_as_an_option_is_refused(option: str) -> None:
    with pytest.raises(SparkSettingsError, match=f"without secrets, found {option}") as refused:
        executor_credentials(WITH_SECRET, with_options(LOCAL, servers="n", **{option: _SECRET}))
    assert _SECRET not in str(refused.value)


@pytest.mark.parametrize("option", ["servers", "connection"])
def test_an_address_with_credentials_is_refused_before_spark_shows_it(option: str) -> None:
    with pytest.raises(SparkSettingsError, match=f"found an @ in {option}") as refused:
        executor_credentials(WITH_SECRET, with_options(LOCAL, **{option: f"nats://u:{_SECRET}@host"}))
    assert _SECRET not in str(refused.value)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(SparkSettingsError, match="found stream: correct it"):
        executor_credentials(WITH_SECRET, with_options(LOCAL, stream="orders"))


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "expected pyspark 4.1 or later where this task runs, found none"),
        ({"pyspark-client": "4.3.0"}, "found none"),
        ({"pyspark": "4.0.5"}, "expected pyspark 4.1 or later, found 4.0.5"),
        ({"pyspark": "4.3.0", "pyspark-client": "4.2.0"}, "expected pyspark-client of the version of pyspark, 4.3.0"),
    ],
)
def test_an_unusable_pyspark_is_refused(
    versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SparkSettingsError) as refused:
        require_pyspark()
    assert message in str(refused.value)


def test_an_error_of_an_executor_keeps_its_class() -> None:
    text = (
        "Job aborted: Lost task: org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "airflow_provider_jetstream.jetstream.errors.ConnectionSettingsError: expected servers, found none\n\n"
        "\tat org.apache.spark.api.python.BasePythonRunner\n"
    )
    message = error_message(RuntimeError(text))
    assert message == {"error": "expected servers, found none", "code": "JS101", "terminal": True}
    assert error_message(SelectionError("no"))["terminal"] is True
    assert error_message(KeyError("x")) == {"error": "KeyError: 'x'", "code": "", "terminal": False}
