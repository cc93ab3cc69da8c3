from __future__ import annotations

import pytest

from airflow_provider_jetstream.spark.errors import SparkOptionError
from testbed.spark_face import read_options, socket_settings

_STREAM = {"stream": "orders"}


def test_the_stream_must_be_named() -> None:
    with pytest.raises(SparkOptionError, match="expected the option stream, found none"):
        read_options({"servers": "host"}, "read")
    with pytest.raises(SparkOptionError, match="found no options: Spark passes"):
        read_options({}, "read")


def test_a_domain_holds_for_a_named_connection_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_ORDERS_URL", "host")
    monkeypatch.setenv("NATS_ORDERS_JS_DOMAIN", "leaf")
    assert socket_settings({**_STREAM, "connection": "orders"}).jetstream_api == "$JS.leaf.API"
    assert socket_settings({**_STREAM, "connection": "orders", "apiPrefix": "hub.api"}).jetstream_api == "hub.api"
