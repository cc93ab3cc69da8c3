"""Health check of a worker container: the NATS server has a live connection from this address.

The server drops a client that stops answering its pings, so a worker whose event loop hangs fails this check too;
a check of the container's own processes would not notice.
"""

import http.client
import json
import os
import sys
import urllib.parse

PAGE = 1024


def connected(monitor_url: str, timeout: float = 5.0) -> bool:
    """Return whether the server's monitoring endpoint lists a client connection from this process's address.

    ``timeout`` is in seconds per answer.
    """
    url = urllib.parse.urlsplit(monitor_url)
    if url.hostname is None:
        raise ValueError(f"expected a URL such as http://nats:8222, found {monitor_url!r}: set NATS_MONITOR_URL")
    offset = 0
    while True:
        connection = http.client.HTTPConnection(url.hostname, url.port or 8222, timeout=timeout)
        try:
            connection.connect()
            own_address = connection.sock.getsockname()[0]
            connection.request("GET", f"/connz?limit={PAGE}&offset={offset}")
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise OSError(f"expected status 200 from {monitor_url}/connz, found {response.status}")
            answer = json.load(response)
        finally:
            connection.close()
        if any(client["ip"] == own_address for client in answer["connections"]):
            return True
        offset += PAGE
        if offset >= answer["total"]:
            return False


def main() -> int:
    """Print the result and return the exit code: 0 for healthy, 1 for not."""
    monitor_url = os.environ.get("NATS_MONITOR_URL", "http://nats:8222")
    try:
        healthy = connected(monitor_url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{monitor_url} gave no usable answer: {error}")
        return 1
    print("connected" if healthy else f"{monitor_url} has no connection from this container")
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
