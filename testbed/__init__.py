"""Real parts run locally: a nats-server, an Airflow; used by the demo, the tests and the benchmarks."""
