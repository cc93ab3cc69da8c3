"""Tries a worker in any language against docs/worker-contract.md, and says which lines of it the worker keeps."""
