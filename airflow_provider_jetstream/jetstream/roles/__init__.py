"""The permissions on the server that each role needs for a queue, and no others."""
