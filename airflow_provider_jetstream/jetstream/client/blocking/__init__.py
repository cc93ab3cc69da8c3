"""The connection on a blocking socket, for processes that have no event loop."""
