# make         an environment, the steps text, two small models, the lines inside, a page of figures
# make code    a model of Python's own source, a sample, and its page
# make test    the tests; make test-slow runs the long ones
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check
SHELL = /bin/bash
.SHELLFLAGS = -o pipefail -c

# On Linux, memory that a step frees is kept for the next step: a few percent of the time on a CPU.
export MALLOC_TRIM_THRESHOLD_ = 2147483647
export MALLOC_MMAP_THRESHOLD_ = 33554432

# The two models train side by side.
all: .venv/installed
	$(MAKE) --no-print-directory -j2 figures/index.html

code: figures/code/index.html

# Without an NVIDIA device, torch's own index has a build without CUDA, a tenth of the download. Where that index can't
# be reached, pip takes the build of requirements.txt.
.venv/installed: requirements.txt
	@echo "make: installs torch, once; this takes one or two minutes"
	$(PYTHON) -m venv .venv
	@test -e /dev/nvidiactl || $(PIP) --retries 0 --timeout 10 `grep ^torch requirements.txt` \
	  --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || echo "make: torch's CPU index can't be reached"
	$(PIP) -r requirements.txt pytest pytest-xdist 2>&1 | { grep --line-buffered -v ^WARNING || true; }
	@$(BIN)/python -c "import torch, numpy, tiktoken, matplotlib, pytest"
	touch $@

# Other programs on the same cores can make training several times slower.
idle:
	@awk -v cores=`getconf _NPROCESSORS_ONLN` '$$1 > 0.7 * cores \
	  {print "make: other programs use " $$1 " of " cores " cores, so this takes longer"}' /proc/loadavg 2>/dev/null || true

data/stdlib/meta.json data/steps/meta.json: data/%/meta.json: | .venv/installed
	$(BIN)/python prepare.py $* --out data/$*

# An interrupted run is continued.
TRAIN = $(BIN)/python train.py --out $(@D) `test -f $(@D)/ckpt.pt && echo --resume`
STEPS = --data data/steps --n_layer 6 --n_embd 64 --mlp_ratio 2 --schedule wsd --max_iters 1500

# Two residuals on the steps text, where it is known which depth a digit needs: PreNorm, and NAG that skips a quarter.
runs/steps-pre/done: data/steps/meta.json | .venv/installed idle
	$(TRAIN) $(STEPS) | while read -r line; do echo "pre | $$line"; done
	touch $@

runs/steps-nag/done: data/steps/meta.json | .venv/installed idle
	$(TRAIN) $(STEPS) --residual nag --mod gain:rate=0.25 --gate_lr 3e-3 | while read -r line; do echo "nag | $$line"; done
	touch $@

# The lines that the text never shows, read out of the model
inside: runs/steps-pre/done
	@$(BIN)/python sample.py runs/steps-pre --prompt f314159265358 --inside

figures/index.html: runs/steps-pre/done runs/steps-nag/done inside
	$(BIN)/python analyze.py runs/steps-pre runs/steps-nag --out figures

runs/code/done: data/stdlib/meta.json | .venv/installed idle
	$(TRAIN) --data data/stdlib --residual nag --gain_cost 1 --mod gain:below=0.05 --gate_lr 3e-3
	touch $@

figures/code/index.html: runs/code/done
	$(BIN)/python sample.py runs/code --prompt "def " --temperature 0.6 --max_new_tokens 260
	$(BIN)/python analyze.py runs/code --out figures/code

test: .venv/installed idle
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests

test-slow: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests --slow -m slow

# Only what `make` has made.
clean:
	rm -rf runs/code runs/steps-pre* runs/steps-nag* data/stdlib data/steps figures

.PHONY: all code idle inside test test-slow clean
