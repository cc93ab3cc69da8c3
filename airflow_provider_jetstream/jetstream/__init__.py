"""The ground floor: JetStream work queues, without Airflow and without Spark."""
