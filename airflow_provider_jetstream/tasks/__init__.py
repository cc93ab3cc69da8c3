"""What operators share: identity, results and errors, template values, the Spark process."""

from airflow_provider_jetstream.airflow_version import require_airflow

require_airflow()
