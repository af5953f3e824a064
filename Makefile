# Two commands do everything on a fresh machine: `make demo` and `make test`.
# They need python3 (3.10 or newer, with venv and pip) and Java 17; all else is installed here, once.

PYTHON ?= python3
VENV   := .venv
VENV35 := .venv-spark35
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long lint format lock test-spark35 bench simulate chaos chaos-kafka chaos-stores clean

help:  ## list these commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## install the locked versions into .venv

demo: $(VENV)/.installed  ## a pipeline killed again and again, beside plain Spark (about 3 minutes)
	@$(BIN)/semel demo $(ARGS)

test: $(VENV)/.installed lint  ## lint, types and the whole test suite, on real Spark
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.installed  ## ruff and mypy over every file
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.installed  ## rewrite the files as ruff wants them
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

test-long: $(VENV)/.installed  ## what takes too long for every build: more chains of kills, more broken servers
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m long $(ARGS)

test-spark35: $(VENV35)/.installed  ## the smaller suite under PySpark 3.5.7
	@$(VENV35)/bin/python -m pytest -n 2 --dist worksteal -m "spark35 and not long" $(ARGS)

bench: $(VENV)/.installed  ## what exactly-once adds to a batch, beside Spark's own sink; run it on a quiet machine
	@$(BIN)/python benchmarks/overhead.py $(ARGS)

SEEDS ?= 2000
simulate: $(VENV)/.installed  ## the real coordinator in simulated worlds; SEEDS=100000 for the long run
	@$(BIN)/python -m semel.simulation --seeds $(SEEDS) $(ARGS)

chaos: $(VENV)/.installed  ## semel verify over all combinations of sinks: 265 kills, 1.9 million rows; ARGS="--seed N" replays
	@$(BIN)/python -m tests.chaos.long $(ARGS)

chaos-kafka: $(VENV)/.installed  ## its part from Kafka to Kafka: 350,000 rows, 50 kills
	@$(BIN)/python -m tests.chaos.long --only kafka $(ARGS)

chaos-stores: $(VENV)/.installed  ## its part into Kafka, PostgreSQL and MariaDB at once: a million rows, 50 kills
	@$(BIN)/python -m tests.chaos.long --only kafka,postgres,mariadb $(ARGS)

lock: $(VENV)/.installed  ## resolve requirements/*.in again, for every Python that semel supports
	@for line in spark40 spark35; do \
	  $(BIN)/uv pip compile -q --upgrade --universal --python-version 3.10 --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-header --no-annotate --extra dev pyproject.toml requirements/$$line.in -o requirements/$$line.lock; done

clean:  ## remove the environments and what runs left behind; .semel-dev stays, `semel dev down --remove` is for it
	rm -rf $(VENV) $(VENV35) .pytest_cache .mypy_cache .ruff_cache demo-output verify-output

# $(1) environment, $(2) lock file. The stamp makes a second run need no network.
define install
	@echo "[1/3] creating $(1)"; $(PYTHON) -m venv $(1)
	@echo "[2/3] installing the versions of $(2) (PySpark is about 430 MB; a few minutes the first time)"
	@$(1)/bin/pip install --progress-bar on --require-hashes -r $(2)
	@echo "[3/3] installing semel itself"; $(1)/bin/pip install -q --no-deps --no-build-isolation -e .
	@touch $(1)/.installed
endef

$(VENV)/.installed: requirements/spark40.lock pyproject.toml
	$(call install,$(VENV),requirements/spark40.lock)

$(VENV35)/.installed: requirements/spark35.lock pyproject.toml
	$(call install,$(VENV35),requirements/spark35.lock)
