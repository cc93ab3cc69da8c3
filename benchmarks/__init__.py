"""Measurements: whole processes and whole workloads, side by side, counts verified first."""
