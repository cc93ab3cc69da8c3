# Every target sets up what it needs by itself: uv where it is missing, then the locked environment.

UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .tools/bin/uv)
RUN := $(UV) run --locked
CODE := airflow_provider_jetstream testbed demo example_dags example_workers benchmarks tests

.PHONY: demo test check format lint types imports unit test-mapped test-waiting-scale test-faults bench-imports bench-redrive bench-waiting bench-spark clean

demo: $(UV)
	$(RUN) python -m demo

# Airflow's tests share one Airflow, Spark's one JVM, and have the machine to themselves; the others wait more than they
# work.
test: $(UV)
	$(RUN) pytest tests/airflow
	$(RUN) pytest tests/spark
	$(RUN) pytest -n 4 --ignore=tests/airflow --ignore=tests/spark

check: format lint types test

format: $(UV)
	$(RUN) ruff format --check $(CODE)

lint: $(UV)
	$(RUN) ruff check $(CODE)

types: $(UV)
	$(RUN) mypy
	$(RUN) mypy --strict testbed demo example_workers benchmarks

imports: $(UV)
	$(RUN) pytest tests/unit/test_import_rule.py tests/environment

unit: $(UV)
	$(RUN) pytest tests/unit

# Three runs of sixty mapped tasks each; the test command has one.
test-mapped: $(UV)
	MAPPED_RUNS=3 $(RUN) pytest tests/airflow/test_airflow_mapped.py

# A thousand deferred tasks whose triggerers come and go; the test command has two dozen.
test-waiting-scale: $(UV)
	WAITING_TASKS=1000 $(RUN) pytest tests/airflow/test_airflow_moving.py

# More letters, more interleavings and workers that are away; the test command has the short form.
test-faults: $(UV)
	FAULTS=full $(RUN) pytest tests/faults

bench-redrive: $(UV)
	$(RUN) python -m benchmarks.redrive
	$(RUN) python -m benchmarks.redrive --rounds 1 --letters 10000 100000 --ways copy

# In an environment of its own: the peer brings packages that the other programs would import where they find them.
bench-waiting: $(UV)
	$(RUN) --isolated --group bench python -m benchmarks.waiting

# Prints what JVM and server leave of two cores: compare within a run only.
bench-spark: $(UV)
	$(RUN) python -m benchmarks.spark_read

bench-imports: $(UV)
	$(RUN) python -m benchmarks.imports

clean:
	rm -rf .venv .tools .cache .pytest_cache .mypy_cache .ruff_cache

uv:

.tools/bin/uv:
	python3 -m venv .tools
	.tools/bin/python -m pip install --quiet uv
