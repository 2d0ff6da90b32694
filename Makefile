# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PARITY := .venv-parity/bin
OUT ?= out

.PHONY: demo test check parity bench bench-tpu stress lock image template clean

# Generates the sample prompts with the built-in checkpoint into out/demo.
demo: .venv/installed
	$(BIN)/lightmill generate --input model_handlers/embedded/prompts.txt --output $(OUT)/demo

test: .venv/installed-test
	$(BIN)/python -m pytest -q -n auto --dist loadfile

check: .venv/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

# Compares every network and whole pictures with diffusers on PyTorch (CPU), in an environment of its own.
parity: .venv/installed-test .venv-parity/installed
	$(PARITY)/python -m tests.parity.reference $(OUT)/parity
	LIGHTMILL_REFERENCE=$(OUT)/parity LIGHTMILL_PARITY_TABLE=docs/parity.md $(BIN)/python -m pytest -q tests/parity

# Prints the tables of benchmarks/README.md; about an hour and a half on two cores, 7 GB of disk and 8 of memory.
bench: .venv/installed-test .venv-parity/installed
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.device
	$(BIN)/python -m benchmarks.load

# Compiles SDXL base 1.0 for a TPU, without one, and prints what it takes; about half an hour on two cores.
bench-tpu: .venv/installed-test
	$(BIN)/python -m benchmarks.tpu

# The tests that need many throws: 100 runs into a failing store, 50 kills, 10,000 damaged files; hours on two cores.
stress: .venv/installed-test
	$(BIN)/python -m benchmarks.stress faults
	$(BIN)/python -m benchmarks.stress kills
	$(BIN)/python -m benchmarks.stress fuzz

# Rewrites the pinned versions that CI and the worker image install.
lock: .venv/installed-test
	$(BIN)/pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --strip-extras --no-annotate --no-header --no-emit-index-url --no-emit-find-links --extra test --extra check --extra train --extra tpu \
		--output-file requirements.lock pyproject.toml

# Builds and pushes IMAGE, such as us-west1-docker.pkg.dev/PROJECT/images/lightmill:1; ACCELERATOR is tpu or cuda12.
ACCELERATOR ?= tpu
image:
	docker build --build-arg ACCELERATOR=$(ACCELERATOR) --tag $(IMAGE) .
	docker push $(IMAGE)

# Makes TEMPLATE, such as gs://bucket/lightmill.json, of an IMAGE that was pushed.
template:
	gcloud dataflow flex-template build $(TEMPLATE) --image $(IMAGE) --sdk-language PYTHON \
		--metadata-file pipeline/metadata.json

.venv/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable .[test,check,train]
	touch $@

.venv-parity/installed: tests/parity/requirements.txt
	$(PYTHON) -m venv .venv-parity
	$(PARITY)/pip install --quiet --disable-pip-version-check --requirement tests/parity/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-parity $(OUT) build *.egg-info
