# make         a virtual environment, data, a small trained model, a sample of it and figures (5 to 8 minutes)
# make test    the tests (6 to 8 minutes on two cores); make test-slow runs the long ones too
PYTHON ?= python3
BIN = .venv/bin

all: figures/depth.json

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt pytest
	touch $@

data/stdlib/meta.json: | .venv/installed
	$(BIN)/python prepare.py stdlib --out data/stdlib

# The model and the PreNorm baseline, so that the figures have something to compare. An interrupted run is continued.
runs/%/done: data/stdlib/meta.json | .venv/installed
	$(BIN)/python train.py --residual $* --out runs/$* `test -f runs/$*/ckpt.pt && echo --resume`
	touch $@

figures/depth.json: runs/pre/done runs/nag/done
	$(BIN)/python sample.py runs/nag --prompt "def " --max_new_tokens 200
	$(BIN)/python analyze.py runs/pre runs/nag --out figures

# Two processes side by side, about equally long: most tests that run our programs, and all others.
TRAINING = $(patsubst %, tests/test_%.py, bad_state inference mod_train prepare readme report sample train)
OTHERS = $(filter-out $(TRAINING), $(wildcard tests/test_*.py))

test: .venv/installed
	@$(BIN)/python -m pytest -q $(OTHERS) > .venv/others.log 2>&1 & others=$$!; \
	$(BIN)/python -m pytest -q $(TRAINING); training=$$?; \
	wait $$others; others=$$?; cat .venv/others.log; exit $$((training + others))

test-slow: .venv/installed
	$(BIN)/python -m pytest -q tests --slow

# Only what `make` has made.
clean:
	rm -rf runs/pre runs/nag data/stdlib figures/depth.json figures/*.png

.PHONY: all test test-slow clean
