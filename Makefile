# make demo    train a small GPT with our norms beside torch.nn's
# make gallery    train the demo's model with every norm and placement
# make family    a table of every norm: which tests ran, and how they ended
# make test    build and run every test that is not slow (GoogleTest, pytest, format, lint)
# make test-all    the slow ones too, and test-simt
# make test-simt    run the CUDA kernels on the host at every switch-over of their plans: some 15 minutes
# All work on a fresh clone; TORCH=2.11.0 does the same beside another torch.
DEFAULT_TORCH := 2.15.0
TORCH ?= $(DEFAULT_TORCH)
PYTHON ?= python3
JOBS ?= $(shell nproc)
# What a development build compiles CUDA kernels for: one architecture takes two minutes, all eight.
CUDA_ARCHS ?= 90

SUFFIX := $(if $(filter $(DEFAULT_TORCH),$(TORCH)),,-$(TORCH))
VENV := .venv$(SUFFIX)
BUILD := build$(SUFFIX)
PY := $(VENV)/bin/python
RUN := PYTHONPATH=$(BUILD)/stage $(PY)
# Everything clang-format looks at.
CXX_FILES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

.DEFAULT_GOAL := build
MAKEFLAGS += --no-print-directory
.PHONY: build demo gallery test test-all test-simt bench family format lint clean

# What a machine lacks is said in one line, before anything is downloaded.
$(VENV)/.installed: tests/requirements.txt
	@PYTHON=$(PYTHON) bash tests/tools.sh check
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q -r tests/requirements.txt torch==$(TORCH)
	touch $@

$(BUILD)/cmake/build.ninja: $(VENV)/.installed CMakeLists.txt tests/CMakeLists.txt
	@bash tests/tools.sh googletest $(CURDIR)/$(BUILD)/googletest
	cmake -S . -B $(BUILD)/cmake -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) -DFUSEDNORM_WERROR=ON \
	  -DCMAKE_PREFIX_PATH=$(CURDIR)/$(BUILD)/googletest/usr \
	  -DFUSEDNORM_STAGE=$(CURDIR)/$(BUILD)/stage -DFUSEDNORM_CUDA_ARCHS="$(CUDA_ARCHS)"

build: $(BUILD)/cmake/build.ninja
	cmake --build $(BUILD)/cmake -j $(JOBS)
	cmake --install $(BUILD)/cmake --prefix $(BUILD)/stage > /dev/null

# On its own, without tests, and without CUDA kernels unless ARGS="--device cuda" asks for them: a newcomer waits
# for one minute and not for five.
demo gallery: $(VENV)/.installed
	cmake -S . -B $(BUILD)/demo -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) -DFUSEDNORM_BUILD_TESTS=OFF \
	  $(if $(findstring cuda,$(ARGS)),-DFUSEDNORM_CUDA=1 -DFUSEDNORM_CUDA_ARCHS="$(CUDA_ARCHS)",-DFUSEDNORM_CUDA=0)
	cmake --build $(BUILD)/demo -j $(JOBS)
	cmake --install $(BUILD)/demo --prefix $(BUILD)/demo/stage > /dev/null
	PYTHONPATH=$(BUILD)/demo/stage $(PY) benchmarks/$@.py $(ARGS)

SIMT := FUSEDNORM_SIMT_LIBRARY=$(CURDIR)/$(BUILD)/cmake/tests/libfusednorm_simt.so

test: build
	ctest --test-dir $(BUILD)/cmake -j $(JOBS) --output-on-failure $(ARGS)

# Not what has nothing to show there: one thread runs the kernels, 2^31 elements take hours, a new process has no library.
test-simt: build
	$(SIMT) FUSEDNORM_SIMT_FULL=1 OMP_NUM_THREADS=1 $(RUN) -m pytest -p no:cacheprovider -m "not slow" -n $(JOBS) \
	  tests/simt $(addprefix tests/operators/test_,add_norm.py values.py guarantees.py operators.py field_reports.py) \
	  --deselect tests/operators/test_guarantees.py::test_threads_do_not_change_bits \
	  --deselect tests/operators/test_field_reports.py::test_b32_more_than_2_to_the_31_elements \
	  --deselect tests/operators/test_field_reports.py::test_b76_options_survive_a_program $(ARGS)

# One failing does not hide what the others find; the last lines are a runner's summary.
test-all:
	status=0; $(MAKE) test || status=1; \
	$(RUN) -m pytest -p no:cacheprovider -m slow tests || status=1; \
	$(MAKE) test-simt || status=1; exit $$status

family: build
	$(RUN) tests/family.py --simt $(BUILD)/cmake/tests/libfusednorm_simt.so $(ARGS)

# ONNX Runtime is a rival to compare with, and left out where it cannot be installed.
bench: build
	-$(PY) -m pip install --disable-pip-version-check -q -r benchmarks/requirements.txt
	cmake --build $(BUILD)/cmake --target bench_small_calls
	$(RUN) benchmarks/bench_norms.py --programs $(BUILD)/cmake $(ARGS)

format: $(VENV)/.installed
	$(VENV)/bin/clang-format -i $(CXX_FILES)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

lint: $(VENV)/.installed
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf build build-* dist *.egg-info
