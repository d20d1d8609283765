# make demo: measure this machine, then train examples/gpt.py with two workers for about a minute.   make test: everything CI runs.
# Both need Python 3.11 or newer, make and a C compiler; all else is installed into .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: setup demo test check format bench bench-planner bench-pipeline bench-zero bench-collectives parallel exact clean

# The file is made last: a setup that was cut short starts again, one that is done is instant.
setup: .venv/.done
.venv/.done: pyproject.toml constraints.txt build_native.py $(wildcard shoal/native/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "shoal needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/shoal probe
	$(BIN)/shoal train examples/gpt.py --workers 2

# Tests that start several processes have the cores for themselves; of the others, two files run at once.
ALONE := tests/cli tests/comm tests/fault tests/launch tests/sync tests/tasks tests/training tests/test_api.py

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2 --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(BIN)/pytest $(ALONE)

check: test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What a training step costs through shoal, beside a bare PyTorch loop and bare DDP; and the instant verbs. 5 minutes.
bench: setup
	$(BIN)/shoal bench step examples/gpt.py
	$(BIN)/shoal bench step examples/digits.py --steps 20
	$(BIN)/shoal train examples/digits.py --steps 50 --runs runs/bench --json > /dev/null
	$(BIN)/shoal bench start "runs/bench/$$(ls -t runs/bench | head -n 1)"

# The figures of docs/accuracy.md. TRUTH is the folder of the public measurements, a100_single_node.csv and
# a100_multi_node.csv, which are not part of shoal. 10 minutes.
bench-planner: setup
	@test -n "$(TRUTH)" || echo "Without TRUTH=FOLDER, the step times on A100 clusters are left out."
	@test -z "$(TRUTH)" || $(BIN)/python benchmarks/planner.py --truth "$(TRUTH)"
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/trace_llama.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/demo.py

# Every model under every mesh against one process: the table of docs/parallel.md. Half an hour.
parallel: setup
	$(BIN)/python -W ignore benchmarks/parallel.py

# The bubble of each pipeline schedule beside its theory, and what ZeRO's workers hold. 2 and 5 minutes.
bench-pipeline: setup
	$(BIN)/python -W ignore benchmarks/pipeline.py

bench-zero: setup
	$(BIN)/python -W ignore benchmarks/zero.py

# Every all-reduce beside Gloo's and, where mpirun and mpi4py are installed, Open MPI's; and its picture. 2 minutes.
bench-collectives: setup
	$(BIN)/shoal bench collectives --plot docs/images/collectives.svg

# The examples at full size with 1 to 4 workers against one process: the largest difference of a loss.
exact: setup
	$(BIN)/pytest tests/training/test_exactness.py --full-size --quiet

clean:
	rm -rf .venv runs dist
