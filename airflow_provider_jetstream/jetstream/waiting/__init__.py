"""Waiting for jobs to end: cursor, follower of ends, policy, report.

Every end is stored, so a waiter needn't be subscribed at the right moment: a cursor taken before publishing holds the
positions from which to read, and a waiter that starts late, or again after a restart, reads the same events.
"""
