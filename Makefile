# make         an environment, data, two small trained models, a sample and figures: about 7 minutes on two idle cores
# make test    the tests, about a minute; make test-slow runs the long ones
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# On Linux, memory that a step frees is kept for the next step: a few percent of the time on a CPU.
export MALLOC_TRIM_THRESHOLD_ = 2147483647
export MALLOC_MMAP_THRESHOLD_ = 33554432

all: figures/index.html

# Without an NVIDIA device, torch's own index has a build without CUDA, a tenth of the download. Where that index can't
# be reached, pip takes the build of requirements.txt.
.venv/installed: requirements.txt
	@echo "make: installs torch, once; without a target it trains two small models, too: 7 minutes on two idle cores"
	$(PYTHON) -m venv .venv
	@test -e /dev/nvidiactl || $(PIP) --retries 0 --timeout 10 `grep ^torch requirements.txt` \
	  --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || echo "make: torch's CPU index can't be reached"
	$(PIP) -r requirements.txt pytest pytest-xdist
	touch $@

# Other programs on the same cores can make training several times slower.
idle:
	@awk -v cores=`getconf _NPROCESSORS_ONLN` '$$1 > 0.7 * cores \
	  {print "make: other programs use " $$1 " of " cores " cores, so this takes longer"}' /proc/loadavg 2>/dev/null || true

data/stdlib/meta.json: | .venv/installed
	$(BIN)/python prepare.py stdlib --out data/stdlib

# PreNorm and NAG, so that the figures have something to compare. An interrupted run is continued.
runs/%/done: data/stdlib/meta.json | .venv/installed idle
	$(BIN)/python train.py --residual $* --out runs/$* `test -f runs/$*/ckpt.pt && echo --resume`
	touch $@

figures/index.html: runs/pre/done runs/nag/done
	$(BIN)/python sample.py runs/nag --prompt "def " --max_new_tokens 200
	$(BIN)/python analyze.py runs/pre runs/nag --out figures

test: .venv/installed idle
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests

test-slow: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests --slow -m slow

# Only what `make` has made.
clean:
	rm -rf runs/pre runs/nag data/stdlib figures

.PHONY: all idle test test-slow clean
