"""Columnar parsing of what the server sends: NATS frames to NumPy and Arrow."""
