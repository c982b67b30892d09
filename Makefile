# make           trains two small models on a puzzle, reads what one computes inside, draws figures
# make code      trains a model of Python's own source, samples from it, draws its figures
# make workshop  trains the models of the workshop
# make test      runs the tests; make test-slow runs the long ones
# make clean     deletes what make and make code have made
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check
SHELL = /bin/bash
.SHELLFLAGS = -o pipefail -c

# On Linux, this keeps memory that an iteration frees for the next one: some percent faster on CPUs.
export MALLOC_TRIM_THRESHOLD_ = 2147483647
export MALLOC_MMAP_THRESHOLD_ = 33554432

all: .venv/installed
	@echo "make: trains PreNorm and NAG side by side, then draws figures/index.html"
	$(MAKE) --no-print-directory -j2 figures/index.html

code: figures/code/index.html

workshop: data/steps/meta.json data/stdlib/meta.json | .venv/installed
	@echo "make: trains the models of the workshop, one after another"
	PATH="$(CURDIR)/$(BIN):$$PATH" bash workshop/train.sh

# Without an NVIDIA device, torch's own index has a build without CUDA and Triton, a tenth of the
# download. If that index can't be reached, pip takes the usual build.
.venv/installed: requirements.txt
	@echo "make: installs torch into .venv, once; this takes one or two minutes"
	$(PYTHON) -m venv .venv
	@test -e /dev/nvidiactl || $(PIP) --retries 0 --timeout 10 `grep ^torch requirements.txt` \
	  --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
	  || echo "make: torch's CPU index can't be reached"
	$(PIP) -r requirements.txt pytest pytest-xdist
	touch $@

data/stdlib/meta.json data/steps/meta.json: data/%/meta.json: | .venv/installed
	$(BIN)/python prepare.py $* --out data/$*

# --resume continues an interrupted run, and begins a new one. Two trainings side by side, or two
# workers of the tests, with a thread per core each would wait for each other: one thread each.
TRAIN = $(BIN)/python train.py --out $(@D) --resume
STEPS = --data data/steps --n_layer 6 --n_embd 64 --mlp_ratio 2 --schedule wsd --max_iters 1500

runs/steps-pre/done: data/steps/meta.json | .venv/installed
	OMP_NUM_THREADS=1 $(TRAIN) $(STEPS) | while read -r line; do echo "pre | $$line"; done
	touch $@

runs/steps-nag/done: data/steps/meta.json | .venv/installed
	OMP_NUM_THREADS=1 $(TRAIN) $(STEPS) --residual nag --residual_lr 3e-3 \
	  --gate_loss 0.2 --mod gate:below=0.05 | while read -r line; do echo "nag | $$line"; done
	touch $@

figures/index.html: runs/steps-pre/done runs/steps-nag/done
	@echo "make: reads from the stream what NAG computes block by block"
	$(BIN)/python sample.py runs/steps-nag --prompt e314159265358 --inside
	@echo "make: measures and draws both models"
	$(BIN)/python analyze.py runs/steps-pre runs/steps-nag --out figures

runs/code/done: data/stdlib/meta.json | .venv/installed
	$(TRAIN) --data data/stdlib --residual nag --gate_loss 1 --mod gate:below=0.05 --residual_lr 3e-3
	touch $@

figures/code/index.html: runs/code/done
	$(BIN)/python sample.py runs/code --prompt "def " --temperature 0.6 --max_new_tokens 260
	$(BIN)/python analyze.py runs/code --out figures/code

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests

test-slow: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests --slow -m slow

clean:
	rm -rf runs/code runs/steps-pre runs/steps-nag data/stdlib data/steps figures

.PHONY: all code workshop test test-slow clean
