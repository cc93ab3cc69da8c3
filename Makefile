# Every target sets up its own prerequisites: uv where it is missing, then the locked environment.
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .tools/bin/uv)
RUN := $(UV) run --locked
# Airflow and Spark start some hundred Python processes, which would compile their imports without cached bytecode.
unexport PYTHONDONTWRITEBYTECODE
CODE := airflow_provider_jetstream docs testbed tools demo docker example_dags example_workers benchmarks tests
TESTED = $(RUN) python -m tools.run_tests $@

.PHONY: $(filter-out bench-spark-%,$(shell sed -n 's/^\([a-z][a-z -]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST))))

help: ## this page; targets of a line that ends in … have more of their kind in this file
	@sed -n 's/^\([a-z][a-z -]*\):.*## \(.*\)/make \1#\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'#' '{printf "%-20s %s\n", $$1, $$2}'

demo: $(UV) ## queues, workers, Airflow and Spark, running the example DAGs; KEEP=1 keeps them
	$(RUN) python -m demo

check: format lint types imports test ## every gate, and make test
format: $(UV) ## ruff's formatting
	$(RUN) ruff format --check $(CODE)
lint: $(UV) ## ruff's rules
	$(RUN) ruff check $(CODE)
types: $(UV) ## mypy, strict
	$(RUN) mypy
	$(RUN) mypy $(foreach file,$(wildcard tests/conftest.py tests/*/conftest.py),-m $(subst /,.,$(basename $(file))))
imports: $(UV) ## the rules of the architecture
	$(RUN) pytest tests/unit/test_architecture.py

# Many tests wait for a server most of their time. Airflow's tests have one process, Spark's another.
test: $(UV) chromium ## the quick tests, and one of each real thing
	$(TESTED) --processes=6 --hypothesis-profile=quick -m "not slow or smoke"
test-changed: $(UV) ## the tests that run the lines changed since SINCE (HEAD), for some 50 s
	$(RUN) python -m tools.changed_tests $(SINCE)
test-rest: $(UV) chromium ## of the other tests as many as WITHIN seconds, in the order of .ci/order
	$(TESTED) --processes=6 -m "slow and not smoke and not nightly" --order=.ci/order --start-within=$(or $(WITHIN),2400)
test-all: test-all-server test-all-airflow test-all-spark ## every test, in three parts for three machines
test-all-server: $(UV)
	$(TESTED) --processes=4 --hypothesis-profile=thorough -m "not (airflow or browser or jvm or registry or nightly)"
test-all-airflow: $(UV) chromium
	$(TESTED) --processes=2 -m "(airflow or browser) and not (registry or nightly)"
test-all-spark: $(UV)
	$(TESTED) --processes=3 -m "(jvm or registry) and not nightly"
test-nightly: test-elsewhere test-long test-servers matrix bench-spark-soak ## long forms, fuzzing, versions, soak: hours
test-elsewhere: $(UV) chromium # other versions, the services of docker-compose.yml, a database that is killed
	$(RUN) --isolated --group database pytest -v -rP -m nightly
test-compose := tests/environment/test_compose_services.py
test-database-restarts := tests/airflow/test_airflow_database_restarts.py
test-spark-elsewhere := tests/environment/test_spark_cluster.py tests/environment/test_spark_provider.py tests/environment/test_spark_isolation.py
test-spark-versions := tests/environment/test_spark_versions.py
test-ui-versions := tests/ui/test_ui_versions.py
check-alerts := tests/server/test_alert_rules.py
test-compose test-database-restarts test-spark-elsewhere test-spark-versions test-ui-versions check-alerts: $(UV)
	$(RUN) --isolated --group database pytest -v -rP $($@)

test-long: test-faults fuzz conformance simulate-hour # what test-all has in short
	MAPPED_RUNS=3 MAPPED_TASKS=60 $(RUN) pytest tests/airflow/test_airflow_mapped.py
	WAITING_TASKS=1000 $(RUN) pytest tests/airflow/test_airflow_triggers_moved.py
test-faults: $(UV) # killed redrives, random steps against the model of a queue, killed drivers, a million messages
	FAULTS=full $(RUN) pytest tests/faults
	FAULTS=full $(RUN) pytest -s tests/spark/test_bulk_redrive_faults.py tests/spark/test_bulk_redrive_kills.py \
		tests/spark/test_spark_driver_kills.py tests/spark/test_exact_reads.py
fuzz: $(UV) # a minute for each parser of what comes from outside
	FUZZ_SECONDS=60 $(RUN) pytest --processes=2 tests/unit/test_parser_fuzzing.py
	$(RUN) pytest --processes=2 --hypothesis-profile=fuzz tests/unit/spark/test_bulk_parser.py
test-servers: $(UV) ## scans and redrives with older servers …
	$(RUN) python -m tools.server_versions
matrix: $(UV) ## writes docs/reliability.md: every supported server, Airflow, Python; MATRIX="server --case redrive" …
	$(RUN) python -m tools.matrix $(MATRIX)
conformance: $(UV) # scripts of each kind on the simulated server and on nats-server 2.15.1, 2.12.8 and 2.10.27
	$(RUN) python -m testbed.simulated.conformance $(or $(SCRIPTS),24)
simulate: $(UV) ## worlds of the simulated server: SEEDS=0:2000
	$(RUN) python -m testbed.simulated $(or $(SEEDS),0:200)
simulate-hour: $(UV) # worlds of an hour on each of two cores, from seeds that change by the day
	first=$$(($$(date +%j) * 1000000)); for shard in 0 1; do \
		$(RUN) python -m testbed.simulated $$((first + shard)):$$((first + 1000000)):2 3600 & pids="$$pids $$!"; done; \
		for pid in $$pids; do wait $$pid || failed=1; done; exit $${failed:-0}
bench: $(UV) ## the workloads of docs/benchmarks.md; bench-NAME runs benchmarks/NAME.py with ARGS …
	for workload in publishing worker short_waits dead_letters wait redrive growth imports; do \
		$(RUN) --isolated --group bench python -m benchmarks.$$workload || exit 1; done
bench-%: $(UV) # in an environment of its own, because peers install packages that other programs would import
	$(RUN) --isolated --group bench python -m benchmarks.$(subst -,_,$*) $(ARGS)
bench-spark-redrive: ARGS ?= --letters 100000
bench-spark-letters: ARGS ?= --direct
bench-spark: $(UV) # JVM and server share two cores with the benchmark: compare figures of one run only
	for workload in read "read --size 1024 --library 100000" queue write; do \
		$(RUN) python -m benchmarks.spark_streams $$workload || exit 1; done

screenshots: $(UV) chromium ## takes the pictures of docs/screenshots again
	SCREENSHOTS=1 $(RUN) pytest tests/ui/test_ui_pictures.py tests/ui/test_ui_runbook.py tests/ui/test_ui_tutorial.py
reference: $(UV) ## writes docs/reference from the code, and the picture and the sizes of the rooms
	$(RUN) python -m tools.reference
	$(RUN) python -m tools.room_picture
	$(RUN) python -m tools.room_sizes
api-types: $(UV) ## writes the front end's types from the models of its API
	$(RUN) python -m tools.api_types
contract-files: $(UV) ## writes docs/contract from the models that read these messages
	$(RUN) python -m tools.contract_files
release: $(UV) ## builds a release into dist/ and checks what users get
	$(RUN) python -m tools.release
site: $(UV) ## builds the documentation, .cache/site/index.html
	$(UV) run --isolated --locked --only-group docs sphinx-build --fail-on-warning --keep-going --nitpicky --builder html docs .cache/site

web: web/node_modules ## builds the front end into the package; needs Node
	npm --prefix web run --silent build
web-check: web/node_modules ## compares the front end with a new build; its lint, types and tests
	npm --prefix web run --silent check
web/node_modules: web/package-lock.json
	@command -v npm >/dev/null || { echo "web/ needs Node 20 or later with npm: install the package nodejs" >&2; exit 1; }
	npm --prefix web ci --no-audit --no-fund --ignore-scripts
	@touch web/node_modules

chromium: # the browser of tests/ui, and the fonts of Airflow's own pages
	@command -v chromium >/dev/null || { if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "tests/ui need Chromium: have somebody install the package chromium" >&2; exit 1; fi; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core fonts-inter; }
clean:
	rm -rf web/node_modules .venv .tools .cache .pytest_cache .mypy_cache .ruff_cache
uv:
.tools/bin/uv:
	python3 -m venv .tools
	.tools/bin/python -m pip install --quiet uv
