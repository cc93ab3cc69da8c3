"""A JetStream server in memory, with simulated time and faults, for the same code that talks to a real one.

What it does differently from a nats-server is its defect: ``tests/simulated/test_conformance.py`` plays the same
scripts on both.
"""
