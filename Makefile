# `make demo` sets up everything and runs a three-node gang; `make test` passes the tests. Both need git, python3, make.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 5
READY := $(VENV)/ready
# Long tests stand side by side in their files: a worker that is done takes some of another's.
SHARED := -n $(WORKERS) --dist worksteal

.PHONY: demo test other ray ray-slow slow faults soak lint bench setup clean
demo: $(READY)
	$(VENV)/bin/python -m tests.demo

test: $(READY)
	$(VENV)/bin/python -m pytest -q $(SHARED) -m "not slow and not ray" --ignore tests/faults

# What CI adds: the gang and groups on the other Slurm, the wheel, gigabytes of output.
other: $(READY)
	$(VENV)/bin/python -m pytest -q $(SHARED) -m slow tests/test_other_slurm.py tests/test_package.py \
	    tests/test_executor.py tests/test_minislurm.py tests/test_states.py tests/minislurm

# What needs a real Ray: installs it (400 MB) and runs one cluster of three raylets, one test after the other.
ray: MARKED = ray and not slow
ray-slow: MARKED = ray and slow
ray ray-slow: $(READY)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[ray]'
	$(VENV)/bin/python -m pytest -q -n 1 -m "$(MARKED)"

# All that takes longer, some of it Slurm's own minutes.
slow: $(READY)
	$(VENV)/bin/python -m pytest -q $(SHARED) -m "slow and not ray" --ignore tests/faults

# Every fault but those that take Slurm minutes; `python -m tests.faults` provokes these too and writes docs/faults.md.
faults: $(READY)
	$(VENV)/bin/python -m pytest -q $(SHARED) -m "not slow" tests/faults

soak: $(READY)
	$(VENV)/bin/python -m tests.soak $(SOAK)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)
	$(VENV)/bin/python -m benchmarks

setup: $(READY)

# apt packages (as root on Debian) and a virtual environment with everything; again whenever these files change.
$(READY): pyproject.toml .ci/setup
	sh .ci/setup "$(PYTHON)" "$(VENV)"
	touch $@

clean:
	rm -rf $(VENV)
