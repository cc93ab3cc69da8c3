"""A Spark application in a process of its own, which reports its progress and ends when its Airflow task ends."""
