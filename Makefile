# `make demo` and `make test` do all the set-up on a fresh machine: .venv, pinned installs, the work.
SHELL := /bin/bash
.DEFAULT_GOAL := test
.PHONY: demo demo-vision test test-full test-oldest test-newest test-swift test-trainers \
	architectures docs lint fmt gpu gpu-rehearsal bench clean

PIP := -m pip install --quiet --disable-pip-version-check
EXTRAS := .[peft,demo,test,dev]
# The site is built by a test of `make test-full`.
WITH_DOCS := .[peft,demo,test,dev,docs]
BIN := .venv/bin

# Ranks share the machine's cores: one thread each. Two test files run at a time; with more cores, for
# example `make test-full FILES=8`. A file stays in one process, for what its tests share.
export OMP_NUM_THREADS := 1
# Scripts and ranks import the package hundreds of times, so its bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE
FILES := 2
SEVERAL_AT_A_TIME := -n $(FILES) --dist loadfile --no-loadscope-reorder

# $(call timed,COMMANDS): what `make test` takes where the set-up is done, and COMMANDS' exit code.
timed = start=$$SECONDS; $(1); code=$$?; \
	echo "make $@: $$((SECONDS - start)) s without the set-up"; exit $$code
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && \
	$(BIN)/lint-imports --no-cache && $(BIN)/mypy hf_moe_ep

# torch goes first and by its exact version: where an index offers a CPU build of that version it
# is taken, while a range would resolve to the newest CUDA build.
.venv/.done: setup.cfg pyproject.toml constraints.txt
	python3 -m venv .venv
	$(BIN)/python $(PIP) torch==2.13.0
	$(BIN)/python $(PIP) -c constraints.txt -e '$(WITH_DOCS)'
	touch $@

.venv-oldest/.done: setup.cfg pyproject.toml constraints-oldest.txt
	python3 -m venv .venv-oldest
	.venv-oldest/bin/python $(PIP) torch==2.11.0
	.venv-oldest/bin/python $(PIP) -c constraints-oldest.txt -e '$(EXTRAS)'
	touch $@

# No pins: what the index calls the newest. Delete .venv-newest to hear of newer ones.
.venv-newest/.done: setup.cfg pyproject.toml
	python3 -m venv .venv-newest
	.venv-newest/bin/python $(PIP) --upgrade --upgrade-strategy eager -e '$(EXTRAS)'
	touch $@

# Other projects' trainers: an environment each, with the trainer's own versions of everything. The
# tests are those of tests/runner/test_NAME.py. The folder in PYTHONPATH says what they need on CPUs.
TRAINERS := axolotl ms_swift llama_factory
NEEDS_axolotl := axolotl==0.19.0
# ms-swift names neither msgspec, which it imports for reinforcement learning, nor the packages
# that it needs for pictures. Our tests of experts in nf4 need bitsandbytes.
NEEDS_ms_swift := ms-swift==4.6.0 msgspec qwen_vl_utils decord torchvision==0.28.0 \
	bitsandbytes
# LLaMA-Factory pins an older Transformers than hf_moe_ep needs, so it is installed without its
# pins. Its activation checkpointing fails with Transformers 5.24. torchvision and torchaudio are left
# out, because an index has CUDA builds of them only.
NEEDS_llama_factory := transformers==5.19.0 accelerate==1.15.0 peft==0.20.0 trl==0.24.0 \
	datasets==4.0.0 'av<=16.0.0' einops fire matplotlib omegaconf pandas pydantic scipy \
	sentencepiece tiktoken 'tyro<0.9.0'
WITHOUT_PINS_llama_factory := llamafactory==0.9.5

.venv-trainers/%/.done: setup.cfg pyproject.toml
	python3 -m venv $(@D)
	$(@D)/bin/python $(PIP) torch==2.13.0
	$(@D)/bin/python $(PIP) torch==2.13.0 pytest pytest-xdist $(NEEDS_$*)
	$(@D)/bin/python $(PIP) --no-deps -e . $(WITHOUT_PINS_$*)
	touch $@

demo: .venv/.done
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/run_demo.sh

demo-vision: .venv/.done
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/run_vision_demo.sh

test: .venv/.done
	@$(call timed,$(LINT) && $(BIN)/python -m pytest $(SEVERAL_AT_A_TIME) -m 'not slow and not gpu')

test-full: .venv/.done
	@$(call timed,$(LINT) && \
		$(BIN)/python -m pytest $(SEVERAL_AT_A_TIME) -m 'not gpu and not rehearsal')

test-oldest: .venv-oldest/.done
	@$(call timed,.venv-oldest/bin/python -m pytest $(SEVERAL_AT_A_TIME) -m 'not slow and not gpu')

test-newest: .venv-newest/.done
	@$(call timed,.venv-newest/bin/python -m pytest $(SEVERAL_AT_A_TIME) -m 'not slow and not gpu')

# Our own tests on the versions that ms-swift pins (PEFT 0.20, TRL 0.29), in its environment.
SWIFT_TESTS := tests/claims/test_parity.py tests/claims/test_trl_of_trainers.py tests/integrations \
	tests/lora tests/checkpoints/test_training.py tests/runner/test_lean_load.py tests/vision
test-swift: .venv-trainers/ms_swift/.done
	@export PYTHONPATH=tests/support/trainers_on_cpu; \
	$(call timed,.venv-trainers/ms_swift/bin/python -m pytest $(SEVERAL_AT_A_TIME) \
		-m 'not slow and not gpu' $(SWIFT_TESTS))

# Two trainers at a time, as above. xargs ends with an error if one of them does.
test-trainers: $(TRAINERS:%=.venv-trainers/%/.done)
	@$(call timed,printf '%s\n' $(TRAINERS) | PYTHONPATH=tests/support/trainers_on_cpu \
		xargs -P 2 -I NAME env .venv-trainers/NAME/bin/python -m pytest tests/runner/test_NAME.py)

# ARCHITECTURES.md, from what the tests of all model types find; the page is written in any case.
architectures: .venv/.done
	rm -f architectures.jsonl
	-RECORD_ARCHITECTURES=architectures.jsonl $(BIN)/python -m pytest $(SEVERAL_AT_A_TIME) -m 'not gpu' \
		tests/architectures tests/sequence/test_granted.py tests/sequence/test_refused.py \
		tests/sequence/test_context_of_types.py tests/vision/test_towers.py \
		tests/vision/test_sequence_of_types.py tests/vision/test_adapters_of_towers.py \
		tests/checkpoints/test_layout_on_ranks.py
	PYTHONPATH=tests $(BIN)/python -m support.architectures.table architectures.jsonl
	rm architectures.jsonl

# The site, in out/site. The notebooks are run for their outputs and plots, which takes minutes.
docs: .venv/.done
	DOCS_EXECUTE=true $(BIN)/mkdocs build --strict

lint: .venv/.done
	$(LINT)

fmt: .venv/.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a GPU machine: its own python3, nothing is installed. Parts 1 to 7, at most ten minutes each;
# results go to $OUT, or to benchmarks/results/<gpu>/raw (benchmarks/gpu.py).
PART ?= 1
gpu:
	python3 benchmarks/gpu.py $(PART)

gpu-rehearsal: .venv/.done
	$(BIN)/python -m pytest -s -m rehearsal tests/benchmarks

NOT_ALONE := $(patsubst %,benchmarks/%.py,benchmark_text models ranks timing gpu gpu_report \
	layer_kernels block_candidates machine_code ahead_of_time compile_kernels \
	stub_driver launch_steps \
	absent_packages over_nodes engine_names sglang_names)

bench: .venv/.done
	set -e; for script in $(filter-out $(NOT_ALONE),$(sort $(wildcard benchmarks/*.py))); do \
		$(BIN)/python $$script; done

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-trainers out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
