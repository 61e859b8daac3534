PYTHON ?= python3

DEMO := .venv
TEST := .venv-test

# Files run in the order of their names. In the order of their numbers of tests, which is the default, the longest would
# come last and leave a core idle.
PYTEST = $(TEST)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
QUICK = $(PYTEST) -m "not slow"

# Other machines, as far as the environment can stand for them: a processor without vectors, one with AVX2 alone, two
# threads, and one without a compiler. The elementwise work (elementwise.cpp) picks its own instructions, whatever is
# asked.
OTHER_PROCESSOR := ATEN_CPU_CAPABILITY=default ADALOG_LEVEL=scalar
OTHER_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ADALOG_LEVEL=avx2
OTHER_THREADS := OMP_NUM_THREADS=2
OTHER_LIBRARY := ADALOG_NATIVE=/nonexistent
# The modules whose results depend on how a processor rounds. Every `make test` runs them on a machine that is two of
# these at once, without vectors and without a compiler.
ROUNDING := $(patsubst %,tests/test_%.py,assignment blockwise bounds convolution evolution fused golden gradients \
	integer methods objective paper quantizers ranges released rewrite runtime scales strategies)

.PHONY: help demo test check portable lint docs clean distclean

help:
	@echo "make demo       set up $(DEMO), then quantize, run and evaluate the bundled model (ARGS=\"--seed 1\" for options)"
	@echo "make test       set up $(TEST) with every extra, then run lint, types, docs and every test"
	@echo "make check      lint, types and the tests that are not slow"
	@echo "make portable   the tests that are not slow, as four other kinds of machine would run them"
	@echo "make lint       lint, format and types only"
	@echo "make docs       build the documentation strictly into build/site, without a network"
	@echo "make clean      remove caches, build products and the demo's output"
	@echo "make distclean  clean, and remove both environments and the compiled kernels"

demo: $(DEMO)/.stamp
	$(DEMO)/bin/adalog demo $(ARGS)

# Several threads in each of the processes that tests start would wait for each other.
test check: export OMP_NUM_THREADS = 1
# Modules are compiled when they are first imported, because pip would compile all of 14,000 files.
test check: export PYTHONDONTWRITEBYTECODE =

test: lint docs
	$(PYTEST)
	$(OTHER_PROCESSOR) $(OTHER_LIBRARY) $(QUICK) $(ROUNDING)

check: lint
	$(QUICK)

portable: $(TEST)/.stamp
	$(OTHER_PROCESSOR) $(QUICK)
	$(OTHER_AVX2) $(QUICK)
	$(OTHER_THREADS) $(QUICK)
	$(OTHER_LIBRARY) $(QUICK)

lint: $(TEST)/.stamp
	$(TEST)/bin/ruff check
	$(TEST)/bin/ruff format --check
	$(TEST)/bin/mypy

docs: $(TEST)/.stamp
	NO_MKDOCS_2_WARNING=1 $(TEST)/bin/python -m mkdocs build --strict

# An environment is set up again only when the metadata, the pinned versions or the kernels, compiled then, change.
KERNELS := $(wildcard src/adalog/runtime/native/*.cpp src/adalog/runtime/native/*.h) \
	src/adalog/quantizers/elementwise.cpp setup.py

$(DEMO)/.stamp: pyproject.toml $(KERNELS) constraints/demo.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install -c constraints/demo.txt -e .
	@touch $@

$(TEST)/.stamp: pyproject.toml $(KERNELS) constraints/test.txt
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install --no-compile -c constraints/test.txt -e ".[timm,hf,imagenet,coco,openvino,test,dev,docs]"
	@touch $@

clean:
	rm -rf adalog-demo adalog-tables.* build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests tools benchmarks experiments -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(DEMO) $(TEST) src/adalog/_native*.so
