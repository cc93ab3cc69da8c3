"""Handlers for the jobs of the example DAGs."""
