PYTHON ?= python3

DEMO := .venv
TEST := .venv-test

.PHONY: help demo test check lint clean distclean

help:
	@echo "make demo       set up $(DEMO), then quantize, run and judge the bundled model (ARGS=\"--seed 1\" for options)"
	@echo "make test       set up $(TEST) with every extra, then lint, types and every test"
	@echo "make check      the same without the slow tests"
	@echo "make lint       lint, format and types only"
	@echo "make clean      remove caches, build products and the demo's output"
	@echo "make distclean  clean, and remove both environments and the compiled kernels"

demo: $(DEMO)/.stamp
	$(DEMO)/bin/adalog demo $(ARGS)

test: lint
	$(TEST)/bin/python -m pytest -n auto --dist loadfile

check: lint
	$(TEST)/bin/python -m pytest -n auto --dist loadfile -m "not slow"

lint: $(TEST)/.stamp
	$(TEST)/bin/ruff check
	$(TEST)/bin/ruff format --check
	$(TEST)/bin/mypy

# An environment is set up again only when the metadata, the pinned versions or the kernels, compiled then, change.
$(DEMO)/.stamp: pyproject.toml src/adalog/runtime/native/native.cpp src/adalog/search/fused.cpp constraints/demo.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install -c constraints/demo.txt -e .
	@touch $@

$(TEST)/.stamp: pyproject.toml src/adalog/runtime/native/native.cpp src/adalog/search/fused.cpp constraints/test.txt
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install -c constraints/test.txt -e ".[timm,hf,test,dev]"
	@touch $@

clean:
	rm -rf adalog-demo adalog-tables.* build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests tools benchmarks -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(DEMO) $(TEST) src/adalog/_native*.so
