"""A slow connection provider; Spark applications can import it, since it is in the DAGs' folder."""

import time


def find(_: str) -> dict[str, str]:
    """Return the connection after five minutes."""
    time.sleep(300)
    return {"servers": "nats://127.0.0.1:4222"}
