"""Apache Airflow provider for NATS JetStream work queues and their dead letters."""

__version__ = "0.2.0"
