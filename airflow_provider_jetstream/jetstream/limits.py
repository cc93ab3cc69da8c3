"""How large may be what comes from outside: text, numbers and documents that anybody could have written.

What is larger counts as malformed: it is refused, cut or ignored, as the module says that parses it. docs/contracts.md
has the table.
"""

from __future__ import annotations

from typing import Final

# One line of text for people: an explanation, a reason, the message of an error. In characters; the rest is cut off.
LINE: Final = 1_000
# A value within a log line or an error's message.
SHOWN_VALUE: Final = 200

# The subject on which a worker reports a job, in bytes. A server closes the connection of a client that sends a line of
# more than 4,096 bytes, to which a publication's own fields belong.
ADVISORY_SUBJECT: Final = 1_000
# Every other subject to which something is published.
PUBLISHED_SUBJECT: Final = 3_500
# W3C Trace Context: a ``traceparent`` of version 0 has 55 characters, and 512 of ``tracestate`` have to be passed on.
TRACE_PARENT: Final = 128
TRACE_STATE: Final = 512
# Names of streams and consumers, as the server limits them.
NAME: Final = 255
# An id of a job in an event.
EVENT_ID: Final = 10_000

# Durations and sizes are signed 64-bit integers for the server; a sequence is an unsigned one.
INTEGER: Final = 2**63 - 1
SEQUENCE: Final = 2**64 - 1
# The text of a duration, a size or a number.
QUANTITY: Final = 64
# The text of a time; RFC 3339 with nanoseconds has 35 characters.
TIME: Final = 64

# A line of the NATS protocol; the longest is a server's INFO.
PROTOCOL_LINE: Final = 1 << 20
# A message with its headers: the largest ``max_payload`` that a server accepts.
MESSAGE: Final = 64 << 20

# A queue's YAML file: bytes, values with those of each alias, and levels.
QUEUE_FILE: Final = 256 << 10
QUEUE_FILE_VALUES: Final = 20_000
QUEUE_FILE_LEVELS: Final = 20
