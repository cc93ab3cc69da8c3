"""What builds, tests and releases the project; nothing of it is part of the package."""
