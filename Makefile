# Every target sets up its own prerequisites: uv where it is missing, then the locked environment.

UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .tools/bin/uv)
RUN := $(UV) run --locked
# Airflow and Spark start some hundred Python processes. Without cached bytecode each of them compiles its imports again:
# a Spark session then starts in 32 s instead of 8 s.
unexport PYTHONDONTWRITEBYTECODE
CODE := airflow_provider_jetstream docs testbed demo docker example_dags example_workers benchmarks tests

.PHONY: demo demo-spark test test-ui test-ui-versions test-pipeline test-spark-elsewhere chromium screenshots check format lint types imports unit test-mapped test-waiting-scale test-faults test-servers bench bench-imports bench-monitor bench-page-load bench-dev-start bench-redrive bench-waiting bench-spark bench-spark-join bench-spark-letters bench-spark-redrive clean

demo: $(UV)
	$(RUN) python -m demo

# The Spark part of the demo, without the rest.
demo-spark: $(UV)
	$(RUN) python -m demo.spark

# Each needs an environment with another Airflow, which takes minutes to create.
UI_VERSIONS := tests/ui/test_ui_versions.py
UI := tests/airflow/test_airflow_monitor.py tests/airflow/test_airflow_monitor_service.py tests/ui --ignore=$(UI_VERSIONS)
PIPELINE := tests/airflow/test_airflow_spark.py tests/airflow/test_airflow_spark_operators.py \
	tests/spark/test_bulk_redrive.py tests/spark/test_bulk_redrive_faults.py tests/spark/test_dead_letter_reading.py \
	tests/spark/test_dead_letter_report.py tests/spark/test_blocking_connection.py tests/spark/test_entry_table.py
# A standalone cluster, an environment of its own with another PySpark, and a Spark Connect server that is confined; the
# policy of options by itself is in the test command (tests/spark/test_connection_policy.py).
SPARK_ELSEWHERE := $(addprefix tests/environment/test_spark_,cluster.py provider.py isolation.py)
# Environments with each PySpark and Python that is supported, classic and with Spark Connect.
SPARK_VERSIONS := tests/environment/test_spark_versions.py
# Another Airflow and another Spark, for minutes. Whether the file can be read, and its versions, are unit tests.
COMPOSE := tests/environment/test_compose_services.py
LEFT_OUT := $(addprefix --ignore=,$(UI_VERSIONS) $(SPARK_ELSEWHERE) $(SPARK_VERSIONS) $(COMPOSE))

# Redrives that run at once need their share of the processor: beside seven others they outlast their ack waits.
REDRIVES := $(sort $(wildcard tests/server/test_redrive*.py))
WITHOUT_REDRIVES := $(addprefix --ignore=,$(REDRIVES))

# These call Airflow's classes in the test's own process; no scheduler runs for them.
CALLED := $(addsuffix .py,$(addprefix tests/airflow/test_airflow_,completion_trigger hook migration monitor_large \
	monitor_service monitor_truth provision_warnings redrive_operator stats system triggers))

# Needs PostgreSQL and the packages by which Airflow uses it.
DATABASE_RESTARTS := tests/airflow/test_airflow_database_restarts.py

AIRFLOW := $(filter-out $(CALLED) $(DATABASE_RESTARTS),$(sort $(wildcard tests/airflow/test_*.py)))
AIRFLOW_TO_PL := $(filter-out $(CALLED) $(DATABASE_RESTARTS),$(sort $(wildcard \
	tests/airflow/test_airflow_[a-o]*.py tests/airflow/test_airflow_p[al]*.py)))

# Tests of the data source that read and write without a JVM.
WITHOUT_JVM := $(addsuffix .py,$(addprefix tests/spark/test_,blocking_connection bulk_headers bulk_parser data_loss \
	direct_get_headers entry_cleanup fast_path hostile_conditions loss_per_filter nats_socket options package queries_of_several_streams \
	reading repeated_batches several_streams spark_publishing trigger_pace))

# $(call tested,<name>,<arguments of pytest>): what fails beside other tests runs once more by itself, since two cores that
# are shared by eight outlast many a time limit. Both outcomes are printed; what fails again fails the command.
tested = $(RUN) pytest -o cache_dir=.cache/pytest/$(1) $(2) || { \
	[ $$? -eq 1 ] && echo "once more by themselves: the tests that failed beside others" && \
	$(RUN) pytest -o cache_dir=.cache/pytest/$(1) -rA --last-failed --last-failed-no-failures none $(2) -n 0; }

# Airflow's tests share one Airflow for each half of their files. They mostly wait, for longer the busier the machine is,
# so nothing runs beside them. Spark's tests share one JVM that keeps one core busy, so the tests of the page, which share
# one browser, and those that only need the processor run beside them.
test: $(UV) chromium
	$(MAKE) --jobs=2 --output-sync=target --no-print-directory test-airflow-to-pl test-airflow-from-pu
	$(MAKE) --jobs=2 --output-sync=target --no-print-directory test-spark test-beside-spark
	$(call tested,server,-n 8 $(CALLED) tests/server tests/documents tests/testbed $(WITHOUT_REDRIVES))
	$(call tested,faults,-n 4 tests/faults $(REDRIVES))

.PHONY: test-airflow-to-pl test-airflow-from-pu test-spark test-beside-spark
test-airflow-to-pl: $(UV)
	$(call tested,airflow-to-pl,$(AIRFLOW_TO_PL))

test-airflow-from-pu: $(UV)
	$(call tested,airflow-from-pu,$(filter-out $(AIRFLOW_TO_PL),$(AIRFLOW)))

test-spark: $(UV)
	$(call tested,spark,tests/spark $(addprefix --ignore=,$(WITHOUT_JVM)))

test-beside-spark: $(UV) chromium
	$(call tested,ui,tests/ui $(LEFT_OUT))
	$(call tested,unit,-n 2 tests/unit $(WITHOUT_JVM))
	$(call tested,environment,-n 4 tests/environment $(LEFT_OUT))

test-ui: $(UV) chromium
	$(RUN) pytest $(UI)

# Airflow's database, scheduler and triggerer killed while messages start DAGs, on PostgreSQL.
.PHONY: test-database-restarts
test-database-restarts: $(UV)
	$(RUN) --isolated --group database pytest -s $(DATABASE_RESTARTS)

# The monitor page in Airflow 3.1, 3.2 and the locked version, inside Airflow's own UI.
test-ui-versions: $(UV) chromium
	$(RUN) pytest $(UI_VERSIONS)

# The tests of the dead letter pipeline on Spark.
test-pipeline: $(UV)
	$(RUN) pytest $(PIPELINE)

test-spark-elsewhere: $(UV)
	$(RUN) pytest $(SPARK_ELSEWHERE)

# One text of queries on PySpark 4.1, 4.2 and 4.3, classic and through Spark Connect, with Python 3.11 to 3.13. About 15
# minutes; -rP shows the exact versions.
.PHONY: test-spark-versions
test-spark-versions: $(UV)
	$(RUN) pytest -v -rP $(SPARK_VERSIONS)

# The services of docker-compose.yml, as processes: queues, workers, every example DAG, Spark.
.PHONY: test-compose
test-compose: $(UV)
	$(RUN) pytest $(COMPOSE)

# The browser of tests/ui, and the font that Airflow's own pages use.
chromium:
	@command -v chromium >/dev/null || { \
		if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
			echo "tests/ui need Chromium: have somebody install the package chromium" >&2; exit 1; \
		fi; \
		apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core fonts-inter; \
	}

# The rules of monitoring/ in Prometheus, which is Debian's package where none is installed; the test command has it too.
.PHONY: check-alerts
check-alerts: $(UV)
	$(RUN) pytest tests/server/test_alert_rules.py

# Takes the pictures in docs/screenshots again.
screenshots: $(UV) chromium
	SCREENSHOTS=1 $(RUN) pytest tests/ui/test_ui_pictures.py tests/ui/test_ui_runbook.py tests/ui/test_ui_tutorial.py

# Builds the front end of the monitor page from web/ into the package, which carries the built files: only this target
# and web-check need Node.
.PHONY: web web-check
web: web/node_modules
	npm --prefix web run --silent build

# Compares the built files with a new build, lints, checks types, and runs the unit tests of the front end.
web-check: web/node_modules
	npm --prefix web run --silent check

# Writes the types of the front end anew, from the models of its API.
.PHONY: api-types
api-types: $(UV)
	$(RUN) python -m testbed.api_types

# Writes docs/contract anew, from the models that read these messages.
.PHONY: contract-files
contract-files: $(UV)
	$(RUN) python -m testbed.contract_files

# Writes docs/reference anew, from the code.
.PHONY: reference
reference: $(UV)
	$(RUN) python -m testbed.reference

# Builds a release into dist/ and checks what users get: metadata, README, contents, and each file in an empty environment.
.PHONY: release
release: $(UV)
	$(RUN) python -m testbed.release

# Builds the documentation as a site, .cache/site/index.html; a link that leads nowhere is an error.
.PHONY: site
site: $(UV)
	$(UV) run --isolated --locked --only-group docs \
		sphinx-build --fail-on-warning --keep-going --nitpicky --builder html docs .cache/site

web/node_modules: web/package-lock.json
	@command -v npm >/dev/null || { echo "web/ needs Node 20 or later with npm: install the package nodejs" >&2; exit 1; }
	npm --prefix web ci --no-audit --no-fund --ignore-scripts
	@touch web/node_modules

check: format lint types test

format: $(UV)
	$(RUN) ruff format --check $(CODE)

lint: $(UV)
	$(RUN) ruff check $(CODE)

types: $(UV)
	$(RUN) mypy
	$(RUN) mypy $(foreach file,$(wildcard tests/conftest.py tests/*/conftest.py),-m $(subst /,.,$(basename $(file))))

imports: $(UV)
	$(RUN) pytest tests/unit/test_architecture.py tests/unit/test_names.py

unit: $(UV)
	$(RUN) pytest tests/unit

# A minute for each parser of what comes from outside, of which the test command gives each two seconds; and twenty times
# as many buffers, on which the data source's parser is held against one that takes a frame at a time.
.PHONY: fuzz
fuzz: $(UV)
	FUZZ_SECONDS=60 $(RUN) pytest -n 2 tests/unit/test_parser_fuzzing.py
	FUZZ_EXAMPLES=5000 $(RUN) pytest -n 2 tests/spark/test_bulk_parser.py

# Three runs of sixty mapped tasks each; the test command has one of two dozen.
test-mapped: $(UV)
	MAPPED_RUNS=3 MAPPED_TASKS=60 $(RUN) pytest tests/airflow/test_airflow_mapped.py

# A thousand deferred tasks whose triggerers start and stop; the test command has a dozen.
test-waiting-scale: $(UV)
	WAITING_TASKS=1000 $(RUN) pytest tests/airflow/test_airflow_triggers_moved.py

# More letters, more interleavings, runs without workers, three hundred redrives killed in mixes of two and three, ten
# minutes of random steps against the model of a queue, and on Spark ten drivers and five executors killed, and a million
# messages compared with what nats-py reads; the test command has the short form.
test-faults: $(UV)
	FAULTS=full $(RUN) pytest tests/faults
	FAULTS=full $(RUN) pytest -s tests/spark/test_bulk_redrive_faults.py tests/spark/test_bulk_redrive_kills.py \
		tests/spark/test_spark_driver_kills.py tests/spark/test_exact_reads.py

# Scans and redrives with the oldest server that is supported and the first of each later minor release. What a server
# lacks is skipped, with the reason.
SERVERS := 2.10.27 2.11.0 2.12.0 2.14.0
SERVER_TESTS := $(patsubst %,tests/server/test_%.py,advisory_probe dead_letters gate claims late_ends redrive \
	redrive_audit redrive_cut_off redrive_faults redrive_in_place redrive_parking redrive_preview redrive_rate \
	redrive_repair redrive_room redrive_selection hostile_jobs)

test-servers: $(UV)
	$(RUN) pytest -n 4 tests/server/test_server_versions.py
	for version in $(SERVERS); do \
		NATS_SERVER_BIN=$$($(RUN) python -m testbed.nats_binaries $$version) OLDER_SERVER=$$version \
			$(RUN) pytest -n 3 -rs $(SERVER_TESTS) || exit 1; \
	done

# Main flows, attacks and faults with every supported nats-server, Airflow and Python, and with the lowest and newest
# dependencies; writes docs/reliability.md as it goes. Some hours: MATRIX="--environment 2.10.27 --case redrive" runs a
# part. What can't be had on this machine is written down as missing.
.PHONY: matrix matrix-servers matrix-airflow matrix-dependencies
matrix: $(UV)
	$(RUN) python -m testbed.matrix $(MATRIX)

matrix-servers: $(UV)
	$(RUN) python -m testbed.matrix server $(MATRIX)

matrix-airflow: $(UV)
	$(RUN) python -m testbed.matrix airflow $(MATRIX)

matrix-dependencies: $(UV)
	$(RUN) python -m testbed.matrix dependencies $(MATRIX)

# Worlds of the simulated server, for example SEEDS=0:2000; prints how many a minute, and the story of each finding.
SEEDS := 0:200
.PHONY: simulate
simulate: $(UV)
	$(RUN) python -m testbed.simulated $(SEEDS)

# The workloads of docs/benchmarks.md, which writes its sections anew. Add a module to the list when it has a workload.
WORKLOADS := publishing worker short_waits dead_letter_look dead_letter_waits wait redrive growth imports

bench: $(UV)
	for workload in $(WORKLOADS); do $(RUN) --isolated --group bench python -m benchmarks.$$workload || exit 1; done

bench-page-load: $(UV) chromium
	$(RUN) python -m benchmarks.page_load

# Installs the wheel with Airflow into an environment of its own; some four minutes, on an otherwise idle machine.
bench-dev-start: $(UV)
	$(RUN) python -m benchmarks.dev_start

bench-monitor: $(UV)
	$(RUN) python -m benchmarks.monitor

bench-redrive: $(UV)
	$(RUN) --isolated --group bench python -m benchmarks.redrive

# Runs in its own environment, because the peer installs packages that the other programs would import if present.
bench-waiting: $(UV)
	$(RUN) --isolated --group bench python -m benchmarks.waiting

# JVM and server share two cores with the benchmark: compare figures of one run only. About ten minutes.
bench-spark: $(UV)
	$(RUN) python -m benchmarks.spark_read
	$(RUN) python -m benchmarks.spark_read --size 1024 --library 100000
	$(RUN) python -m benchmarks.spark_queue
	$(RUN) python -m benchmarks.spark_write

bench-spark-redrive: $(UV)
	$(RUN) python -m benchmarks.spark_redrive --letters 100000

# Half an hour of a streaming query, and what its memory and its lag become; nothing else should run beside it.
.PHONY: bench-spark-soak
bench-spark-soak: $(UV)
	$(RUN) python -m benchmarks.spark_soak

bench-spark-join: $(UV)
	$(RUN) python -m benchmarks.spark_join

# The long form, --letters 1000000 --rounds 1, takes five minutes.
bench-spark-letters: $(UV)
	$(RUN) python -m benchmarks.spark_letters --direct

bench-imports: $(UV)
	$(RUN) python -m benchmarks.imports

clean:
	rm -rf web/node_modules .venv .tools .cache .pytest_cache .mypy_cache .ruff_cache

uv:

.tools/bin/uv:
	python3 -m venv .tools
	.tools/bin/python -m pip install --quiet uv
