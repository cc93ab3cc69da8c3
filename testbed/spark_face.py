"""The data source without a JVM, for tests of what it plans, reads and writes, and the connection of a Spark task."""

from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import VARIABLES, connection_options, socket_settings
from airflow_provider_jetstream.spark.connections import run_on_own_connection
from airflow_provider_jetstream.spark.source.columns import RequestedColumns
from airflow_provider_jetstream.spark.source.data_source import JetStreamDataSource
from airflow_provider_jetstream.spark.source.options import read_options, write_options
from airflow_provider_jetstream.spark.source.partition_planner import fetch_method, plan_ranges
from airflow_provider_jetstream.spark.source.partition_reader import read_range
from airflow_provider_jetstream.spark.source.publisher import Publisher
from airflow_provider_jetstream.spark.source.row_encoder import RowEncoder
from airflow_provider_jetstream.spark.source.source_stream import SourceStream
from airflow_provider_jetstream.spark.source.stream_reader import JetStreamStreamReader
from airflow_provider_jetstream.spark.source.writer import JetStreamStreamWriter

__all__ = [
    "VARIABLES",
    "BlockingConnection",
    "JetStreamDataSource",
    "JetStreamStreamReader",
    "JetStreamStreamWriter",
    "NatsSocket",
    "Publisher",
    "RequestedColumns",
    "RowEncoder",
    "SourceStream",
    "connection_options",
    "fetch_method",
    "plan_ranges",
    "read_options",
    "read_range",
    "run_on_own_connection",
    "socket_settings",
    "write_options",
]
