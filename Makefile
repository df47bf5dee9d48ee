# PYTHON makes the environments; PY runs things (on a GPU machine without them: make gpu-check PY=python3).
PYTHON ?= python3
PY ?= .venv/bin/python
MAIN_JOB ?= examples/gpt/run.py --mesh
MESHES ?= tp=4 dp=2,tp=2 sp=4 tp=3 dp=8,tp=2
COMPILED ?= dp=32,tp=8 --compile-only --batch 64
RANKS ?= --ranks 4 $(MAIN_JOB) dp=2,tp=2
ENV = $(PYTHON) tools/env.py
PYTEST = $(PY) -m pytest -q
PYRIGHT = PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv/bin/pyright --pythonpath .venv/bin/python
# Two tests at a time; those that start ranks come one after another (tests/conftest.py).
PARALLEL = -n 2 --dist loadscope

.PHONY: help env run check docs docs-serve quick test test-all test-nvfuser test-browser test-models ledger ledger-check faults fuzz lint style types types-examples gpu-check
.PHONY: bench bench-bills bench-compile bench-runtime bench-session test-session bench-models bench-parallel bench-thunder

help:
	@echo "make run        environment and main job: a GPT on simulated ranks, then on 4 real ones"
	@echo "make check      lint, and a few cases of each test that is quick and starts no process; 3 minutes"
	@echo "make test       nvFuser's tests in their own environment, the page's in Chromium, then the main suite"
	@echo "make test-all   all cases of the tests of which 'make test' runs a sample"
	@echo "make test-models  all models of Hugging Face that are known to work, minutes"
	@echo "make docs       the site of the documentation, in build/site; make docs-serve shows it on loopback"
	@echo "make lint       ruff and pyright"
	@echo "make ledger     plans the ledger's programs anew, prints what changed and writes tests/ledger/ledger.json;"
	@echo "                make ledger-check prints only; NAMES='random/ bills/d' for those whose names start so"
	@echo "make faults     kills, stops and misleads ranks, REPEAT=20 times each, and looks at what is left"
	@echo "make test-session  the tests of sessions, each fault REPEAT=20 times"
	@echo "make fuzz       random programs until one fails or Ctrl-C"
	@echo "make bench      the benchmarks, which draw results in docs/plots: bench-bills (bytes on the wire),"
	@echo "                bench-compile (time to compile)"
	@echo "                and bench-runtime (steps on real ranks, beside hand-written torch and DTensor),"
	@echo "                bench-session (calls of a session and rpc, beside a bare channel and torch's RPC)"
	@echo "                bench-models (steps of a Llama beside DTensor and FSDP2), bench-thunder (beside Thunder's),"
	@echo "                bench-parallel (sharded and pipelined steps beside hand-written ZeRO-3 and torch's stages)"
	@echo "make gpu-check  the tests that need a GPU"

env:
	@$(ENV) main >/dev/null

run: env
	@for mesh in $(MESHES); do $(PY) $(MAIN_JOB) $$mesh || exit 1; done
	@$(PY) $(MAIN_JOB) $(COMPILED)
	@.venv/bin/meshfuse run $(RANKS)
	@$(PY) examples/llama/train.py --mesh dp=2,tp=2 --steps 3
	@$(PY) examples/llama/generate.py --mesh tp=2

# For use while working; `make test` decides.
check: env
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint quick

quick: env
	@$(PYTEST) $(PARALLEL) --quick

# pytest's closing line for the main suite comes last: CI reads it.
test: env test-nvfuser test-browser
	@$(PYTEST) $(PARALLEL)

# Status 3: not to be had on this machine, said by tools/env.py in one line. CI has it, so there it is an error.
test-nvfuser:
	@python=$$($(ENV) nvfuser); status=$$?; \
	if [ $$status -eq 0 ]; then $$python -m pytest -q $(PARALLEL) -m 'nvfuser or thunder' tests/nvfuser tests/thunder; \
	elif [ $$status -ne 3 ] || [ -n "$$CI" ]; then exit $$status; fi

# Status 3: there is no browser, which tools/browser.py says in one line.
test-browser: env
	@$(PYTHON) tools/browser.py >/dev/null; status=$$?; \
	if [ $$status -eq 0 ]; then $(PYTEST) -n 0 -m browser tests/browser; elif [ $$status -ne 3 ]; then exit $$status; fi

test-all: env
	@$(PYTEST) $(PARALLEL) --all-cases -m sampled

test-models: env
	@$(PY) -m pytest -q -n 0 -m models tests/models tests/test_docs.py

# Of plans that are meant to change: the file's diff belongs to the same commit.
ledger: env
	@$(PY) tests/ledger/write.py $(NAMES)

ledger-check: env
	@$(PY) tests/ledger/write.py --check $(NAMES)

faults: env
	@$(PY) tests/ranks/faults.py --repeat $(or $(REPEAT),20) $(FAULTS)

# Faults that come at other moments each time; then each in sessions of all kinds, and what is left of them.
test-session: env
	@SESSION_REPEAT=$(or $(REPEAT),20) $(PYTEST) -n 0 --timeout=1200 tests/session
	@$(PY) tests/session/repeat_faults.py --repeat $(or $(REPEAT),20) $(FAULTS)

fuzz: env
	@while $(PYTEST) -m fuzz --hypothesis-profile=fuzz --timeout=0; do :; done; exit 1

# CI has the two of pyright, whose rules differ, at a time.
lint: style types types-examples

style: env
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check

types: env
	@$(PYRIGHT)

types-examples: env
	@$(PYRIGHT) --project examples

docs: env
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

docs-serve: env
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve --dev-addr 127.0.0.1:8000

gpu-check:
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTEST) -m gpu tests/nvfuser
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTEST) -m gpu -n 0 tests/ranks/test_nccl.py

bench: bench-bills bench-compile bench-runtime bench-session bench-models

bench-bills: env
	@$(PY) benchmarks/bills/run.py
	@$(PY) benchmarks/plots.py bills

bench-compile: env
	@$(PY) benchmarks/compile/run.py
	@$(PY) benchmarks/plots.py compile

bench-runtime: env
	@$(PY) benchmarks/runtime/run.py
	@$(PY) benchmarks/runtime/first_calls.py
	@$(PY) benchmarks/plots.py runtime

bench-session: env
	@$(PY) benchmarks/session/run.py
	@$(PY) benchmarks/plots.py session

# Llama steps on real ranks, beside DTensor's eager tensor parallelism and FSDP2.
bench-models: env
	@$(PY) benchmarks/models/run.py

# Beside hand-written ZeRO-3, FSDP2 and torch.distributed.pipelining.
bench-parallel: env
	@$(PY) benchmarks/parallel/run.py

# In the environment that has Thunder.
bench-thunder:
	@PYTHONPATH=. $$($(ENV) nvfuser) benchmarks/models/thunder_step.py
