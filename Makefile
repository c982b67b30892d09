# make         an environment, data, three small models, a sample and two pages of figures: 8 to 12 minutes on two idle cores
# make test    the tests, about a minute; make test-slow runs the long ones
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# On Linux, memory that a step frees is kept for the next step: a few percent of the time on a CPU.
export MALLOC_TRIM_THRESHOLD_ = 2147483647
export MALLOC_MMAP_THRESHOLD_ = 33554432

# The longest training begins at once, and two shorter ones run beside it.
all: .venv/installed
	$(MAKE) -j2 figures/text/index.html figures/index.html

# Without an NVIDIA device, torch's own index has a build without CUDA, a tenth of the download. Where that index can't
# be reached, pip takes the build of requirements.txt.
.venv/installed: requirements.txt
	@echo "make: installs torch, once; without a target it trains three small models, too: 8 to 12 minutes on two idle cores"
	$(PYTHON) -m venv .venv
	@test -e /dev/nvidiactl || $(PIP) --retries 0 --timeout 10 `grep ^torch requirements.txt` \
	  --index-url https://download.pytorch.org/whl/cpu 2>/dev/null || echo "make: torch's CPU index can't be reached"
	$(PIP) -r requirements.txt pytest pytest-xdist
	touch $@

# Other programs on the same cores can make training several times slower.
idle:
	@awk -v cores=`getconf _NPROCESSORS_ONLN` '$$1 > 0.7 * cores \
	  {print "make: other programs use " $$1 " of " cores " cores, so this takes longer"}' /proc/loadavg 2>/dev/null || true

data/stdlib/meta.json data/steps/meta.json: data/%/meta.json: | .venv/installed
	$(BIN)/python prepare.py $* --out data/$*

# An interrupted run is continued.
TRAIN = $(BIN)/python train.py --out $(@D) `test -f $(@D)/ckpt.pt && echo --resume`

# PreNorm and NAG on the steps text, where it is known which depth a model needs. Two cores train side by side,
# so these two write to a file.
runs/steps-%/done: data/steps/meta.json | .venv/installed idle
	@echo "make: trains $(@D), too; its lines are in $(@D).log"
	@mkdir -p runs
	$(TRAIN) --data data/steps --residual $* --n_layer 6 --n_embd 64 --mlp_ratio 2 --schedule wsd --max_iters 1500 \
	  --gate_lr 3e-3 > $(@D).log
	touch $@

# NAG on code, to see text, and the depth of each of its letters. (--n_layer 12 is the small model on a GPU, too.)
runs/nag/done: data/stdlib/meta.json | .venv/installed idle
	$(TRAIN) --residual nag --n_layer 12 --gate_lr 3e-3
	touch $@

figures/text/index.html: runs/nag/done
	$(BIN)/python sample.py runs/nag --prompt "def " --temperature 0.6 --max_new_tokens 260
	$(BIN)/python analyze.py runs/nag --out figures/text

figures/index.html: runs/steps-pre/done runs/steps-nag/done
	$(BIN)/python sample.py runs/steps-pre --prompt f314159265358 --temperature 0 --max_new_tokens 14
	$(BIN)/python analyze.py runs/steps-pre runs/steps-nag --out figures

test: .venv/installed idle
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests

test-slow: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests --slow -m slow

# Only what `make` has made.
clean:
	rm -rf runs/nag runs/steps-pre* runs/steps-nag* data/stdlib data/steps figures

.PHONY: all idle test test-slow clean
