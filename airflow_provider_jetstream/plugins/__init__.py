"""What is added to the Airflow UI."""
