"""Writes docs/reference from the code: docstrings, signatures, models, errors, metrics, parsers and Spark's options."""
