# make demo    generate fruit with a compressed cache, compare with the full one, write results/
# make page    a page and an API on http://127.0.0.1:7860/ (docs/howto/serve.md)
# make test    the default test suite (no GPU, no TPU, no network)
# make test-all    the same with the tests that take minutes
# make lint    ruff, and types of the core and the public API
# make docs    these pages and the API as a site, build/site/index.html
# make chip    draw published models (on a CPU small ones), times by kernel into results/chip-TIME.jsonl
# make aot-venv   .venv-aot, where experiments.aot compiles for GPUs and TPUs that are not here
# make clean   remove .venv, .venv-aot and caches; results/ stays
#
# Each makes .venv first and installs what it needs; a second call finds it there.
#   PYTHON=...   interpreter to make .venv with, at least 3.11; another one than before makes .venv anew.
#                Default: the one that .venv was made with, else python3
#   EXTRAS=gpu   further extras of pyproject.toml to install (gpu, tpu, text), comma-separated
#   MINUTES=40   make chip: after them nothing more begins; ten more, and it is ended
#   ARGS=...     further arguments of the command: make demo ARGS=--budget=0.1, make test ARGS="-k segments"

comma := ,
interpreter_given := $(filter-out undefined default,$(origin PYTHON))
PYTHON ?= python3
EXTRAS ?=
MINUTES ?= 40
ARGS ?=

bin := .venv/bin
more := $(if $(EXTRAS),$(comma)$(EXTRAS))
tag := $(subst $(comma),-,$(more))
for_demo := .venv/.installed-demo$(tag)
for_page := .venv/.installed-page$(tag)
for_test := .venv/.installed-test$(tag)
for_docs := .venv/.installed-docs$(tag)
for_aot := .venv-aot/.installed$(tag)
pip := $(bin)/python -m pip install --quiet --disable-pip-version-check
pip_aot := .venv-aot/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo page test test-all lint docs chip aot-venv clean interpreter

demo: $(for_demo)
	$(bin)/python -m experiments.run --policy=headkv --compare $(ARGS)

page: $(for_page)
	$(bin)/python -m experiments.serve $(ARGS)

test: $(for_test)
	JAX_PLATFORMS=cpu $(bin)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: override ARGS += --slow
test-all: test

lint: $(for_test)
	$(bin)/python -m ruff check .
	$(bin)/python -m ruff format --check .
	$(bin)/basedpyright

# Pages are copied as they lie, so that links between them hold; those to other places fail.
docs: $(for_docs)
	rm -rf build/pages && mkdir -p build/pages
	tar -c *.md docs varjax/core/README.md ported_weights/*/README.md | tar -x -C build/pages
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict --config-file .ci/mkdocs.yml

# EXTRAS=gpu or EXTRAS=tpu
chip: $(for_demo)
	@mkdir -p results
	timeout --kill-after=1m $$(($(MINUTES) + 10))m $(bin)/python -m experiments.bench --draw=all \
	  --minutes=$(MINUTES) --json=results/chip-$$(date +%Y%m%d-%H%M%S).jsonl $(ARGS)

aot-venv: $(for_aot)
	@echo "compile for absent chips with .venv-aot/bin/python -m experiments.aot"

clean:
	rm -rf .venv .venv-aot build .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(for_demo): .venv/.interpreter pyproject.toml
	@echo "installing varjax[eval,port$(more)] into .venv"
	$(pip) --editable '.[eval,port$(more)]'
	@touch $@

$(for_page): .venv/.interpreter pyproject.toml
	@echo "installing varjax[serve$(more)] into .venv"
	$(pip) --editable '.[serve$(more)]'
	@touch $@

$(for_test): .venv/.interpreter pyproject.toml
	@echo "installing varjax[eval,port,dev$(more)] into .venv"
	$(pip) --editable '.[eval,port,dev$(more)]'
	@touch $@

$(for_docs): .venv/.interpreter pyproject.toml
	@echo "installing varjax[docs$(more)] into .venv"
	$(pip) --editable '.[docs$(more)]'
	@touch $@

# Of its own: with JAX's CUDA plugin in .venv every command would look for a GPU. EXTRAS=eval,port,dev
# is for pytest --aot.
$(for_aot): .venv/.interpreter pyproject.toml
	@echo "installing varjax and the compilers of GPUs and TPUs into .venv-aot"
	rm -rf .venv-aot && $(bin)/python -m venv .venv-aot
	$(pip_aot) --editable '.[tpu$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	wanted=$$(.venv-aot/bin/python -c 'import jaxlib; print(jaxlib.__version__)'); $(pip_aot) --no-deps \
	  jax-cuda13-plugin==$$wanted jax-cuda13-pjrt==$$wanted nvidia-cuda-nvcc nvidia-nvvm \
	  nvidia-cuda-runtime nvidia-cuda-crt
	@touch $@

# Holds path and version of the interpreter; rewritten, with all of .venv, only when that changes.
.venv/.interpreter: interpreter
	@if [ -z "$(interpreter_given)" ] && [ -s $@ ] && $(bin)/python -c '' 2>/dev/null; then exit 0; fi; \
	"$(PYTHON)" -c '' 2>/dev/null || { \
	  echo "error: PYTHON=$(PYTHON) does not run: give a Python >= 3.11, as in" \
	    "make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python3.11" >&2; exit 2; }; \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: PYTHON=$(PYTHON) is $$("$(PYTHON)" --version 2>&1): varjax needs Python >= 3.11, as in" \
	    "make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python3.11" >&2; exit 2; }; \
	now="$$("$(PYTHON)" -c 'import os, sys; print(os.path.realpath(sys.executable), sys.version)' | tr '\n' ' ')"; \
	if [ "$$now" = "$$(cat $@ 2>/dev/null)" ] && $(bin)/python -c '' 2>/dev/null; then exit 0; fi; \
	echo "making .venv with $$now"; \
	rm -rf .venv && "$(PYTHON)" -m venv .venv && printf '%s' "$$now" > $@

interpreter:
