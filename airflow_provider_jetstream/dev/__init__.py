"""``jetstream-queue dev``: a nats-server, an Airflow, example queues and workers, as processes of this machine."""
