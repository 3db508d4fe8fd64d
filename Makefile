# libvmem. `make help` lists the targets. Everything built goes to $(BUILD).
BUILD     ?= build
CXX       ?= g++
CC        ?= cc
CXXFLAGS  ?= -O2 -g
CFLAGS    ?= -O2 -g
SAN       ?=
# Sanitizers for the test sources; the library, the simulated device and the tests' common parts use
# SAN.
SAN_TESTS ?= $(SAN)
CUDA      ?= auto
GPU_ARCH  ?= sm_90
PREFIX    ?= /usr/local
LIBDIR    ?= $(PREFIX)/lib
KDIR      ?= /lib/modules/$(shell uname -r)/build
VERSION   := $(shell awk '/define VMEM_VERSION_MAJOR/{a=$$3} /define VMEM_VERSION_MINOR/{b=$$3} END{print a "." b}' include/vmem/vmem.h)
SONAME    := libvmem-tier.so.$(firstword $(subst ., ,$(VERSION)))

# Short lines, or full commands with V=1.
Q         := $(if $(V),,@)
say        = $(if $(V),,@printf '  %-5s %s\n' $(1) $(2))

MAKEFLAGS += --no-builtin-rules --no-print-directory
# Uses all cores unless -j is given; a make started by this one shares its jobs.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
  MAKEFLAGS += -j$(or $(shell nproc 2>/dev/null),1)
endif
.SECONDARY:
.DELETE_ON_ERROR:

include mk/toolchain.mk mk/sources.mk

.PHONY: all
all: lib examples tools  ## the library, static and shared, examples, tools (tests: make build-tests)
.PHONY: lib examples tools build-tests
lib: $(BUILD)/libvmem.a $(BUILD)/libvmem.so $(BUILD)/libvmem-cuda-calls.so
examples: $(EXAMPLES)
tools: $(TOOLS)
build-tests: $(BUILD)/sim/libvmem.so $(if $(UNIT_SRC),$(BUILD)/tests/unit_tests) $(if $(SYS_SRC),$(BUILD)/tests/system_tests) $(if $(CTL_SRC),$(BUILD)/tests/ctl_tests) $(STRESS) $(BENCH) $(KMOD_TEST) $(VM_TEST) $(FORMATS) $(ABI)  ## all test and benchmark programs

# The tests for the sanitizers and for the fast lane of .ci/run.
.PHONY: core-tests test-objects
CORE_SUITES ?= unit system stress
test-objects: $(UNIT_OBJ) $(SYS_OBJ)
core-tests: $(if $(filter unit,$(CORE_SUITES)),$(BUILD)/tests/unit_tests) $(if $(filter system,$(CORE_SUITES)),$(BUILD)/tests/system_tests) $(if $(filter stress,$(CORE_SUITES)),$(STRESS))

include mk/lib.mk mk/tests.mk mk/gpu.mk mk/analysis.mk mk/package.mk

# These targets start a make of their own: two at once would write the same files.
ifneq ($(filter check unit test test-sanitizers,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif

.PHONY: setup demo unit test test-sanitizers bench check docs kmod debug-kernel wheel install clean help
setup:  ## install the packages that everything here needs (asks nothing; prints the command when not root); GROUPS=: scripts/setup.sh
	scripts/setup.sh $(or $(GROUPS),build test check vm)

# Status 77: there is no GPU; the program has said so.
demo: $(BUILD)/examples/vmem-sort $(BUILD)/examples/vmem-stream  ## sort 4 GiB, or FILE=.., with a quarter of it as memory; with a GPU also stream weights to it
	$(BUILD)/examples/vmem-sort $(ARGS) $(FILE)
	@$(BUILD)/examples/vmem-stream $(STREAM_ARGS) || [ $$? -eq 77 ]

unit: | $(call SETUP,test)  ## the unit tests alone
	@$(MAKE) $(BUILD)/tests/unit_tests
	@BUILD=$(BUILD) scripts/run-tests.sh unit

test: | $(call SETUP,build) $(call SETUP,test) $(call SETUP,vm) $(call SETUP,model) $(call SETUP,package)  ## every test that needs no GPU, also in virtual machines; the last line counts
	@$(MAKE) all build-tests
	@BUILD=$(BUILD) scripts/run-tests.sh $(or $(SUITES),unit system ctl abi examples python stress negative vm kmod deb)

test-sanitizers: | $(call SETUP,test)  ## unit, system and stress under AddressSanitizer + UBSan, then ThreadSanitizer
	@scripts/run-sanitizers.sh

bench: $(BENCH) | $(call SETUP,bench)  ## benchmarks beside the raw limit and mmap, figures to $(BUILD)/bench
	@BUILD=$(BUILD) scripts/run-bench.sh $(ARGS)

# These checks read only sources; the others examine the build.
TEXT_CHECKS := format layers interfaces header docs prose readme words sizes shell python
check: | $(call SETUP,check)  ## format, layers, clang-tidy, shellcheck, header, exported names, documents, manual pages, Python; ONLY='format words'
	@$(if $(filter-out $(TEXT_CHECKS),$(or $(ONLY),all)),$(MAKE) all build-tests)
	@BUILD=$(BUILD) scripts/check.sh $(ONLY)

docs: $(BUILD)/tools/docgen  ## write the generated pages (docs/man/*.3, *.7) and the table of docs/settings.md
	@sed '/^<!-- Generated/,$$d' docs/settings.md >$(BUILD)/settings.md
	$(BUILD)/tools/docgen docs
	@sed -n '/^<!-- Generated/,$$p' docs/settings.md >>$(BUILD)/settings.md && mv $(BUILD)/settings.md docs/settings.md

kmod:  ## the kernel module against KDIR= (default: the running kernel's headers)
	$(MAKE) -C kmod KDIR="$(KDIR)" modules

debug-kernel:  ## build the KASAN + lockdep kernel the VM tests use (12 CPU-minutes), into the cache
	@$(if $(NO_SETUP),,scripts/setup.sh --quiet --check kernel || [ $$? -eq 3 ])
	scripts/vm/build-debug-kernel.sh

clean:  ## remove $(BUILD)
	rm -rf $(BUILD)

help:  ## this list
	@awk -F ':.*##' '/^[a-z][a-z-]*:.*##/{sub(/^ */,"",$$2); printf "  make %-16s %s\n", $$1, $$2}' $(filter-out %.d,$(MAKEFILE_LIST))
	@echo "Variables: BUILD=$(BUILD) CXX=$(CXX) CXXFLAGS='$(CXXFLAGS)' CUDA=auto|yes|no SAN=address,undefined|thread SIM=yes NO_SETUP=1 WERROR=-Werror V=1 PREFIX= DESTDIR= KDIR= SUITES='unit system ctl abi examples python stress negative vm kmod deb'"
