"""Who runs the command, for the audit."""

from __future__ import annotations

import getpass
import socket

_LONGEST_NAME = 200


def requester() -> dict[str, str]:
    """Return the person's name on this machine, and the machine's."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return {"user": user, "host": socket.gethostname(), "by": "jetstream-queue"}


def requester_name() -> str:
    """Return who asks for something, in a few words."""
    who = requester()
    return f"{who['user']}@{who['host']}"[:_LONGEST_NAME]
