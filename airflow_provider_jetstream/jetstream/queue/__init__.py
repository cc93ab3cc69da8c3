"""The declaration of a work queue, its checks and lint, and the snapshot of a queue on the server."""
