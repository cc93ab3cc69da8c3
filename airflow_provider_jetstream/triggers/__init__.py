"""Triggers, which wait without holding a worker slot."""
