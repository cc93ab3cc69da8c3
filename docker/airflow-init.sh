#!/usr/bin/env bash
# Migrates the database to this Airflow's schema and sets the admin's password; safe to run at every start.
set -euo pipefail

airflow db migrate

# Without this file Airflow generates a password and prints it to the api-server's log.
umask 077
python -c 'import json, os; print(json.dumps({"admin": os.environ["AIRFLOW_ADMIN_PASSWORD"]}))' \
  > "${AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE}"
