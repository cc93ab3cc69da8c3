"""The audit of a dead letter queue: what was done to which letter."""
