"""Cancellation of jobs: the requests, and the worker's cache of them."""
