"""The error that only ``jetstream-queue dev`` raises, below the tree of ``jetstream.errors``.

::

    TransientError                         the same call may succeed later
    └── DevStackError                      also RuntimeError
"""

from __future__ import annotations

from airflow_provider_jetstream.jetstream.errors import TransientError


class DevStackError(TransientError, RuntimeError):
    """A process of ``jetstream-queue dev`` ended or didn't become ready; the message has the end of its log."""

    code = "JS222"
