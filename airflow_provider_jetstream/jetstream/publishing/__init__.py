"""Publishing jobs, at least once and without duplicates, and the log of what a task has published."""
