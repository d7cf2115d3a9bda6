# Every target makes what it needs in .venv. PYTHON chooses the interpreter to make it with.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test test-integrations test-slow lint format docs package bench clean

demo: .venv/demo-installed  ## ten sources of digits, one of them bad: find it while training, and report
	$(BIN)/inloop run splits --seeds 5 --reward none --out runs/demo/none
	$(BIN)/inloop run splits --seeds 5 --reward oracle --out runs/demo/oracle
	$(BIN)/inloop run splits --seeds 5 --out runs/demo/gar
	$(BIN)/inloop report runs/demo
	@echo "tables and figures of the three runs: open runs/demo/report.html in a browser"

test: $(INSTALLED)  ## the tests
	$(BIN)/pytest -n auto

test-integrations: $(INSTALLED)  ## the tests against Lightning, Hugging Face, Accelerate, trackers and torchrun
	$(BIN)/pytest -n auto -m integrations tests/integrations tests/documents

test-slow: $(INSTALLED)  ## the tests that take minutes
	$(BIN)/pytest -n auto -m slow

lint: $(INSTALLED)  ## style, types, and what may import what
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## the documentation site, in docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

package: $(INSTALLED)  ## wheel and sdist in dist/; the wheel, made from the sdist, is tried in an environment of its own
	rm -rf dist build
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(PYTHON) -m venv build/trial
	build/trial/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[cli]"
	cd build/trial && bin/inloop run splits --seeds 1 --epochs 2 && bin/inloop report runs
	build/trial/bin/python -W error -c "import importlib.resources as r, inloop; assert (r.files(inloop) / 'py.typed').is_file(); inloop.augment.FastAutoAugment()"
	rm -rf build

bench: $(INSTALLED)  ## fails if time or memory of a step has become worse than in results/cost
	$(BIN)/inloop bench --models mlp,wrn-16-4,gpt-6 --modes gar,gar-interleaved,gar-half --against results/cost/bench.json

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,integrations]"
	touch $(INSTALLED)

.venv/demo-installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[cli]"
	touch .venv/demo-installed

clean:
	rm -rf .venv build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
