"""The errors that only the page raises, below the tree of ``jetstream.errors``.

::

    TransientError                         the same call may succeed later
    └── LettersUnreadError
"""

from airflow_provider_jetstream.jetstream.errors import TransientError


class LettersUnreadError(TransientError):
    """The letters of a queue are still being read; the server answers."""

    code = "JS601"
