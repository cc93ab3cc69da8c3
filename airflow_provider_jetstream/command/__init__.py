"""The command ``jetstream-queue``, for people and scripts."""
