"""Waiting for jobs to end: cursor, follower, dispatcher, reconciler, report.

Everything that is waited for is stored, so nothing depends on being subscribed at the right moment: a cursor taken
before publishing says from where to read, and a waiter that joins late, or again after a restart, reads the same
events.
"""
