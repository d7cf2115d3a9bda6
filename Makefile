# Every target makes what it needs in .venv. PYTHON chooses the interpreter to make it with.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test test-device test-gpu test-integrations test-slow test-models lint format docs package bench clean

demo: .venv/demo-installed  ## ten sources of digits, one of them bad: find it while training, and report
	$(BIN)/inloop run splits --seeds 5 --reward none --out runs/demo/none
	$(BIN)/inloop run splits --seeds 5 --reward oracle --out runs/demo/oracle
	$(BIN)/inloop run splits --seeds 5 --out runs/demo/gar
	$(BIN)/inloop report runs/demo
	@echo "tables and figures of the three runs: open runs/demo/report.html in a browser"

test: $(INSTALLED)  ## the tests
	$(BIN)/pytest -n auto
	$(MAKE) test-device

test-device: $(INSTALLED)  ## the tests on a pretend CUDA device, which a C++ compiler builds once; without one they are skipped
	$(BIN)/python -m pytest -n auto -p tests.device.plugin tests/device

test-gpu: .venv/demo-installed  ## on a machine with a GPU: is inloop right there, and what does it cost? Some minutes; writes gpu-report.json
	$(BIN)/python -m benchmarks.gpu

test-integrations: $(INSTALLED)  ## the tests against Lightning, Hugging Face, Accelerate, trackers and torchrun
	$(BIN)/pytest -n auto -m integrations tests/integrations tests/documents

test-slow: $(INSTALLED)  ## the tests that take minutes
	$(BIN)/pytest -n auto -m slow

test-models: $(INSTALLED)  ## one small model of every family of transformers and timm; continues after an interruption
	$(BIN)/python -m pip install --quiet --no-deps --target build/models torchvision==0.28.0 timm==1.0.31 scipy==1.17.1  # not in .venv, where transformers would try to import this torchvision
	PYTHONPATH=build/models $(BIN)/python results/models/run.py
	$(BIN)/python results/models/table.py

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

package: $(INSTALLED)  ## wheels and sdists in dist/; the wheels, made from the sdists, are tried in an environment of their own
	rm -rf dist build
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/python -m build --outdir dist lab > /dev/null
	$(PYTHON) -m venv build/trial
	build/trial/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/inloop-*.whl)[cli]"
	build/trial/bin/python -W error -c "import importlib.resources as r, inloop; assert (r.files(inloop) / 'py.typed').is_file(); inloop.augment.FastAutoAugment()"
	build/trial/bin/python -c "import importlib.util as u, inloop.datasets as d; d.digits(); assert u.find_spec('inloop_lab') is None"
	cd examples && ../build/trial/bin/inloop check check_model:make && ../build/trial/bin/inloop report --help > /dev/null
	build/trial/bin/inloop run splits; test $$? = 2  # says what to install
	build/trial/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/inloop-*.whl)[lab]" dist/inloop_lab-*.whl
	cd build/trial && bin/inloop run splits --seeds 1 --epochs 2 && bin/inloop report runs
	rm -rf build

bench: $(INSTALLED)  ## fails if time, memory, kernels or waits of a step have become worse than in results/cost
	$(BIN)/python -m benchmarks.overhead --against results/cost/overhead.json
	$(BIN)/inloop bench --models mlp,wrn-16-4,gpt-6 --modes gar,gar-interleaved,gar-half --against results/cost/bench.json

$(INSTALLED): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs,integrations]" --editable lab
	touch $(INSTALLED)

.venv/demo-installed: pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lab]" --editable lab
	touch .venv/demo-installed

clean:
	rm -rf .venv build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis
