"""What a subject is needed for, and by which roles: for the text of an error about a permission that is missing.

The policies themselves are in :mod:`airflow_provider_jetstream.jetstream.roles`; a test holds both in step. The
subjects of jobs are the queue's own and aren't known here: every publisher and redriver needs them.
"""

from __future__ import annotations

import re
from typing import Final

_EVERY: Final = (
    *("publisher", "scheduler", "mover", "waiter", "worker", "redriver", "monitor", "spark-reader", "provisioner"),
)
_SCAN: Final = ("redriver", "monitor", "spark-reader")
_PULLS: Final = ("mover", "waiter", "worker", *_SCAN)

# Requests of JetStream's API, after the prefix that a domain may change.
_REQUESTS: Final[dict[str, tuple[str, ...]]] = {
    "INFO": _EVERY,
    "STREAM.INFO": _EVERY,
    "STREAM.LIST": (*_SCAN, "provisioner"),
    "STREAM.NAMES": ("provisioner",),
    "STREAM.CREATE": ("provisioner",),
    "STREAM.UPDATE": ("provisioner",),
    "STREAM.MSG.GET": _EVERY,
    "STREAM.MSG.DELETE": ("redriver",),
    "STREAM.PURGE": ("publisher", "redriver"),
    "DIRECT.GET": (*_SCAN, "provisioner"),
    "CONSUMER.LIST": ("waiter", *_SCAN, "provisioner"),
    "CONSUMER.INFO": ("scheduler", "mover", "worker", *_SCAN, "provisioner"),
    "CONSUMER.CREATE": ("waiter", *_SCAN, "provisioner"),
    "CONSUMER.DELETE": ("waiter",),
    "CONSUMER.MSG.NEXT": (*_PULLS, "provisioner"),
    "CONSUMER.PAUSE": ("redriver",),
    "CONSUMER.RESET": ("redriver",),
}
# What other subjects begin with.
_SUBJECTS: Final[dict[str, tuple[str, ...]]] = {
    "$JS.ACK.": ("mover", "worker", "redriver"),
    "attempts.": ("worker", "redriver"),
    "completed.": ("worker",),
    "cancelled.": ("mover",),
    "dead.": ("worker", "redriver"),
    "published.": ("publisher", "redriver"),
    "parked.": ("redriver",),
    "audit.": ("redriver", "monitor"),
    "scheduled.": ("scheduler", "mover"),
}
# Of the stream of all queues' history.
_SAMPLES: Final = (".airflow_monitor", "airflow_monitor.samples")
_API: Final = re.compile(rf"\$JS\.(?:[^.]+\.)?API\.({'|'.join(map(re.escape, _REQUESTS))})(?:\.|$)")


def roles_needing(action: str, subject: str) -> tuple[str, ...]:
    """Return the roles whose policies allow an action on a subject like this; none where the subject is no known one.

    :param action: ``publish`` or ``subscribe``
    """
    if action == "subscribe":
        return ("worker",) if subject.startswith("cancelled.") else ()
    if subject.endswith(_SAMPLES):
        return ("monitor",)
    if match := _API.match(subject):
        return _REQUESTS[match[1]]
    return next((roles for start, roles in _SUBJECTS.items() if subject.startswith(start)), ())
