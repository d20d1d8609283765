# make demo: measure this machine, then train examples/gpt.py with two workers for about a minute.   make test: everything CI runs.
# Both need Python 3.11 or newer and make; all else is installed into .venv. A C compiler is used where there is one: without it
# shoal works, slower, and the tests of its C part fail.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: setup demo test check format wheel release-check bench bench-planner bench-pipeline bench-zero bench-collectives bench-engines parallel families exact resume screenshots docs docs-serve figures fuzz clean

# The file is made last: a setup that was cut short starts again, one that is done is instant.
setup: .venv/.done
.venv/.done: pyproject.toml constraints.txt build_native.py $(wildcard shoal/native/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "shoal needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@# Apart: the wheel of torchvision that PyPI has cannot be imported beside a torch for processors (benchmarks/families_timm.py).
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/timm $$(grep -E '^(timm|torchvision)==' constraints.txt)
	@touch $@

demo: setup
	$(BIN)/shoal probe
	$(BIN)/shoal train examples/gpt.py --workers 2

# Tests that start several processes run one after the other, with those that mostly wait or import beside them (see
# tests/conftest.py); of the others, two files run at once. In this order: what is measured in tests/advice has only
# tests beside it that wait for Slurm.
ALONE := tests/advice tests/comm tests/launch tests/sync tests/training tests/test_api.py tests/tasks tests/cli tests/docs tests/fault
# Some hundred processes are started: each would compile shoal anew.
unexport PYTHONDONTWRITEBYTECODE

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2 --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(BIN)/pytest --numprocesses 2 --dist loadgroup $(ALONE)

check: test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The sdist and the wheel, into dist/.
wheel: setup
	$(BIN)/python -m hatchling build --target sdist --target wheel --directory dist

# Both built, looked into, installed into a clean environment with the light dependencies alone, and used there. 1 to 3 minutes.
release-check: setup
	$(BIN)/python -m tests.release.check

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

# Families of models as they come, under ZeRO-3, tensor and pipeline, against one process: the table of docs/models.md.
families: setup
	$(BIN)/python -W ignore benchmarks/families.py

# The bubble of each pipeline schedule beside its theory, and what ZeRO's workers hold. 2 and 5 minutes.
bench-pipeline: setup
	$(BIN)/python -W ignore benchmarks/pipeline.py

bench-zero: setup
	$(BIN)/python -W ignore benchmarks/zero.py

# Every all-reduce beside Gloo's and, where mpirun and mpi4py are installed, Open MPI's; and its picture. 2 minutes.
bench-collectives: setup
	$(BIN)/shoal bench collectives --plot docs/images/collectives.svg

# ZeRO as shoal runs it beside ZeRO by DeepSpeed: the table of docs/deepspeed.md. 4 minutes.
bench-engines: setup
	$(BIN)/shoal bench engines examples/gpt.py

# The examples at full size with 1 to 4 workers against one process: the largest difference of a loss.
exact: setup
	$(BIN)/pytest tests/training/test_exactness.py --full-size --quiet

# Damaged JPEGs, 30,000 of them, read by C code that is compiled with sanitizers: ends at the first byte that is read or
# written where it should not be. Needs gcc. 5 minutes.
fuzz: setup
	$(BIN)/python -m tests.native.fuzz_jpegs 30000 --sanitize

# A run stopped after every step of every mesh, and gone on with in the same and in every other mesh.
resume: setup
	$(BIN)/pytest tests/training/test_resume.py --full-size --quiet

# The pictures of docs/report.md, from runs that it makes: needs Debian's chromium. 3 minutes.
screenshots: setup
	$(BIN)/python docs/screenshots.py

# The site of the documentation, into site/; a link to nothing is an error. 15 seconds.
docs: setup
	$(BIN)/python docs/build.py

docs-serve: setup
	$(BIN)/python docs/build.py --serve

# Every drawing of docs/images that is not a screenshot or a measurement (bench-collectives). 10 seconds.
figures: setup
	for plot in docs/plot_*.py; do $(BIN)/python $$plot || exit 1; done

clean:
	rm -rf .venv build runs site dist
