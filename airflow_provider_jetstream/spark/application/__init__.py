"""A Spark application in a process of its own, which tells how far it is and ends when nobody waits for it."""
