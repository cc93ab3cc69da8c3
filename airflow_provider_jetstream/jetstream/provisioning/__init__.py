"""Plan, diff and apply of a queue declaration."""
