# Everything runs in .venv/ of this checkout, which the targets set up when needed.
# Also from elsewhere: make -C path/to/checkout TARGET

# the Python that makes .venv/
PYTHON ?= python3
# what pip is asked for where EXTRAS has the framework; Horovod is compiled against it
TORCH      ?= torch==2.13.0
TENSORFLOW ?= tensorflow-cpu==2.21.*
# Extras of pyproject.toml to install beside those that are installed; the demo needs PyTorch alone.
# For one framework alone: torch,dev or tensorflow,dev
comma := ,
EXTRAS ?= $(if $(filter-out demo help clean,$(MAKECMDGOALS)),torch$(comma)tensorflow$(comma)dev,torch)
# added to the command behind test, test-engines, test-trainers, demo, bench, horovod (for example ARGS="-k hostfile")
ARGS   ?=
# processes that run the tests, a file of tests in one of them; more than cores are of use, since most
# tests wait: two keep two cores idle for a third of the time. 0: in pytest's own process, as its
# debugger (--pdb) needs
TEST_JOBS ?= 3

VENV     := .venv
VPYTHON  := $(VENV)/bin/python
SETTINGS := $(VENV)/.settings
READY    := $(VENV)/.ready
HOROVOD  := $(VENV)/.horovod
ENGINES  := $(VENV)/.engines
TRAINERS := $(VENV)/.trainers
# virtclust, horovodrun and the rest of the environment's programs come first
RUN      := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-engines test-trainers test-debian lint bench horovod horovod-suite env clean FORCE

help:  ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done
	@echo "Settings: PYTHON=$(PYTHON) TORCH=$(TORCH) TENSORFLOW=$(TENSORFLOW) EXTRAS=$(EXTRAS) ARGS=… TEST_JOBS=$(TEST_JOBS)"

demo: $(HOROVOD)  ## train on three virtual hosts while one joins, one leaves and one dies
	@$(RUN) $(VPYTHON) -m hvd_elastic.cli.app demo $(ARGS)

test: $(HOROVOD)  ## run all tests but those of the engines: unit, ssh, real ranks
	@$(RUN) $(VPYTHON) -m pytest --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder $(ARGS)

test-engines: $(ENGINES)  ## install Slurm, Spark and Ray, build Kubernetes once, and run their tests
	@$(RUN) $(VPYTHON) -m pytest --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder tests/engines $(ARGS)

test-trainers: $(TRAINERS)  ## install Lightning and Hugging Face's Trainer, and run their tests
	@$(RUN) $(VPYTHON) -m pytest --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder tests/trainers $(ARGS)

test-debian:  ## run make demo and make test on another Debian or Ubuntu, made by debootstrap: RELEASE=trixie
	@sh scripts/test_debian.sh "$(RELEASE)" $(ARGS)

lint: $(READY)  ## check style, format, types and the oldest Python
	@$(VPYTHON) -m ruff check .
	@$(VPYTHON) -m ruff format --check .
	@$(VPYTHON) -m mypy
	@# what mypy leaves out too: no name or syntax that is newer than the oldest Python
	@$(RUN) vermin --quiet --no-tips --target=3.10- --violations --exclude long --exclude str.decode \
		hvd_elastic benchmarks datasets_prep scripts tests setup.py

bench: $(HOROVOD)  ## measure starts, joins, leaves and failures beside peers
	@$(RUN) $(VPYTHON) benchmarks/startup.py --repetitions 3 $(ARGS)
	@$(RUN) $(VPYTHON) benchmarks/elasticity.py --repetitions 3 $(ARGS)

horovod: $(READY)  ## build Horovod for this environment, or take the kept wheel
	@$(VPYTHON) -m hvd_elastic.cli.app build-horovod $(ARGS)
	@touch $(HOROVOD)

horovod-suite: $(HOROVOD)  ## run Horovod's own tests (CHECKOUT=…) on our build and an unpatched one
	@$(RUN) $(VPYTHON) scripts/horovod_suite.py "$(CHECKOUT)" $(ARGS)

env: $(READY)  ## set up .venv/ without Horovod

clean:  ## remove .venv/ and what tools left (kept Horovod wheels stay in the user's cache)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Rewritten only when a setting differs from last time, or an extra is new, so that a change sets up
# anew. The checkout's path is one: a moved environment does not work.
SETTING := $(PYTHON) $(TORCH) $(TENSORFLOW) $(CURDIR)
INSTALLED := $(shell cat $(READY) 2>/dev/null)
empty :=
ALL_EXTRAS := $(subst $(empty) $(empty),$(comma),$(sort $(subst $(comma), ,$(EXTRAS) $(INSTALLED))))
$(SETTINGS): FORCE
	@mkdir -p $(VENV)
	@printf '%s\n' '$(SETTING)' 'extras: $(ALL_EXTRAS)' | cmp -s - $@ \
		|| printf '%s\n' '$(SETTING)' 'extras: $(ALL_EXTRAS)' > $@

# An environment whose Python is gone, as after an upgrade of the system, is set up anew.
BROKEN := $(if $(wildcard $(READY)),$(shell $(VPYTHON) -c pass >/dev/null 2>&1 || echo FORCE))

$(READY): $(SETTINGS) setup.py pyproject.toml scripts/setup_env.py hvd_elastic/install/pinned.txt $(BROKEN)
	@sh scripts/bootstrap.sh "$(PYTHON)" $(MAKECMDGOALS)
	@"$(PYTHON)" scripts/setup_env.py --venv $(VENV) --torch "$(TORCH)" --tensorflow "$(TENSORFLOW)" \
		--extras "$(ALL_EXTRAS)" $(if $(filter-out env lint,$(MAKECMDGOALS)),--horovod)
	@printf '%s\n' '$(ALL_EXTRAS)' > $@

$(HOROVOD): $(READY) hvd_elastic/install/build_horovod.py $(wildcard hvd_elastic/install/horovod-*.patch)
	@$(VPYTHON) -m hvd_elastic.cli.app build-horovod
	@touch $@

# Slurm comes from the system's packages, Spark and Ray are extras; the tests build Kubernetes.
$(ENGINES): $(HOROVOD)
	@"$(PYTHON)" scripts/setup_env.py --venv $(VENV) --torch "$(TORCH)" --tensorflow "$(TENSORFLOW)" \
		--extras "$(ALL_EXTRAS),spark,ray,kubernetes,moto" --engines
	@touch $@

$(TRAINERS): $(HOROVOD)
	@"$(PYTHON)" scripts/setup_env.py --venv $(VENV) --torch "$(TORCH)" --tensorflow "$(TENSORFLOW)" \
		--extras "$(ALL_EXTRAS),trainers"
	@touch $@
