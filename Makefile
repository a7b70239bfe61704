# make table: from nothing to results/quality/table.md.   make test: everything that must hold.
# make record: all that the config asks for beside fidelity, and quantization.md.
# CONFIG=file.yaml takes another config. All make their own environment in .venv first, from pinned versions.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORES ?= $(shell getconf _NPROCESSORS_ONLN)
CONFIG ?= config/config.yaml
SNAKEMAKE := $(BIN)/snakemake -j$(CORES) --configfile=$(CONFIG)

.PHONY: table record test bench pin docs clean

table: $(VENV)/.installed
	$(SNAKEMAKE) results/quality/table.md

record: $(VENV)/.installed
	$(SNAKEMAKE) results/quality/table.md results/quality/quantization.md

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadgroup

bench: $(VENV)/.installed
	$(BIN)/python -m tests.bench
	$(BIN)/python -m tests.bench_scale

# take the current corpora as the ones that every later run must agree with
pin: $(VENV)/.installed
	cp data/quality/smollm2-135m/manifest.json data/quality/smollm2-135m/pin.json

# keep the results of the last default run where a visitor sees them
docs: $(VENV)/.installed
	$(BIN)/python -m yardstick.cli.record_run --results results/quality --output docs/results --readme README.md \
		--cores $(CORES)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf results/quality data/models data/quality/*/*.npz data/quality/*/manifest.json logs benchmarks
