"""The data source ``jetstream``: batch and streaming reads, and writes."""
