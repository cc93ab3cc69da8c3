"""Runs flows, attacks and faults with every supported version, and writes docs/reliability.md: ``make matrix``."""
