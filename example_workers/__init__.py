"""Handlers that do the jobs of the example DAGs."""
