"""The data source ``jetstream``: reading and writing streams in batches and as they grow."""
