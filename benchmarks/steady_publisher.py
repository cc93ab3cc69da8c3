"""A publisher in a process of its own that stores so many messages a second, each with its number and acknowledged.

It ends when its standard input is closed, and then prints how many messages are stored. After a wait it catches up.
"""

import argparse
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.spark.connection_options import socket_settings

# Digits at the start of each body: the message's number, from 1 on.
NUMBER_DIGITS = 12
# Seconds between two bursts.
_EVERY = 0.02


class SteadyPublisher:
    """A running publisher.

    :ivar stored: how many messages are stored, once it has stopped
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.stored = 0
        self._process = process

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def stop(self) -> None:
        """Publish no more, and wait until all is stored."""
        output, _ = self._process.communicate()
        if self._process.returncode:
            raise SystemExit("the publisher failed")
        self.stored = json.loads(output)


@contextmanager
def steady_publisher(url: str, subject: str, rate: int, size: int) -> Iterator[SteadyPublisher]:
    """Publish messages of one size until the publisher is stopped or the block ends."""
    command = [sys.executable, "-m", "benchmarks.steady_publisher", url, subject, str(rate), str(size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield SteadyPublisher(process)
    finally:
        process.kill()
        process.wait()


def _await_acknowledgements(socket: NatsSocket, expected: int) -> None:
    while expected:
        socket.receive(lambda _buffer, _filled: True)
        position = 0
        while frame := socket.next_frame(position):
            position = frame.end
            if not frame.sid:
                socket.handle_control(frame)
                continue
            answer = json.loads(socket.buffer[frame.offsets[5] : frame.offsets[6]])
            if "seq" not in answer:
                raise SystemExit(f"a message isn't stored: {answer}")
            expected -= 1
        socket.consume(position)


def publish(url: str, subject: str, rate: int, size: int) -> int:
    """Publish until standard input is closed; returns how many messages are stored."""
    filler = b"x" * (size - NUMBER_DIGITS)
    stored = 0
    with closing(NatsSocket(socket_settings({"servers": url}))) as socket:
        line = f"PUB {subject} {socket.new_reply_subject()} {size}\r\n".encode()
        began = time.monotonic()
        while not select.select([sys.stdin], [], [], _EVERY)[0]:
            due = int((time.monotonic() - began) * rate)
            socket.send(b"".join(b"%b%012d%b\r\n" % (line, number, filler) for number in range(stored + 1, due + 1)))
            _await_acknowledgements(socket, due - stored)
            stored = due
    return stored


def main() -> None:
    """Publish, and print how many messages are stored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("subject")
    parser.add_argument("rate", type=int)
    parser.add_argument("size", type=int)
    options = parser.parse_args()
    print(publish(options.url, options.subject, options.rate, options.size))


if __name__ == "__main__":
    main()
