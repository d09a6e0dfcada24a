# Everything runs from .venv, which the first call sets up. Settings of an activated environment stay out.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX PIP_USER PIP_TARGET PIP_PREFIX PIP_CONSTRAINT

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format docs clean

help: ## Say what there is to make
	@awk -F ': .*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## Set up .venv (nothing is done if it is up to date)
	@PYTHON='$(if $(filter command,$(origin PYTHON)),$(PYTHON))' sh scripts/install.sh

demo: install ## Train a small Muon model on 4 CPU ranks with its state on disk
	@$(BIN)/muon-offload train recipe=tiny

test: lint ## Run lint, types, import contracts and all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: install ## Run lint, format check, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: install ## Format the code and fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## Write the pages that are made from the code
	$(BIN)/muon-offload rules --markdown > docs/rules.md

clean: ## Remove caches and build results; .venv and runs/ stay
	rm -rf build dist .mypy_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
