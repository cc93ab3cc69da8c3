"""A provider of connections that takes its time; Spark applications can import it, since it is among the DAGs."""

import time


def find(_: str) -> dict[str, str]:
    """Find nothing for five minutes."""
    time.sleep(300)
    return {"servers": "nats://127.0.0.1:4222"}
