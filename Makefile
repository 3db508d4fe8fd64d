# libvmem. `make help` lists the targets. Everything built goes to $(BUILD).
BUILD     ?= build
CXX       ?= g++
CC        ?= cc
CXXFLAGS  ?= -O2 -g
CFLAGS    ?= -O2 -g
SAN       ?=
# .. of the sources of tests; the library, the simulated device and the tests' common parts have SAN.
SAN_TESTS ?= $(SAN)
CUDA      ?= auto
GPU_ARCH  ?= sm_90
PREFIX    ?= /usr/local
LIBDIR    ?= $(PREFIX)/lib
KDIR      ?= /lib/modules/$(shell uname -r)/build
VERSION   := $(shell awk '/define VMEM_VERSION_MAJOR/{a=$$3} /define VMEM_VERSION_MINOR/{b=$$3} END{print a "." b}' include/vmem/vmem.h)
SONAME    := libvmem-tier.so.$(firstword $(subst ., ,$(VERSION)))

# Short lines, or whole commands with V=1.
Q         := $(if $(V),,@)
say        = $(if $(V),,@printf '  %-5s %s\n' $(1) $(2))

MAKEFLAGS += --no-builtin-rules --no-print-directory
# All cores, unless -j says otherwise; a make below this one shares its jobs.
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
  MAKEFLAGS += -j$(or $(shell nproc 2>/dev/null),1)
endif
.SECONDARY:
.DELETE_ON_ERROR:

# ---- CUDA: auto takes a toolkit that is there, yes insists on one, no does without -------------------------------------
# The library needs its headers alone, of CUDA 12 or later, and opens the driver when a device is first asked for. Examples
# and tests of devices are programs of CUDA's runtime, and have that.
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc) \
  $(patsubst %/include/cuda.h,%/bin/nvcc,$(wildcard /usr/local/cuda/include/cuda.h))))
CUDA_HEADERS := $(and $(CUDA_HOME),$(wildcard $(CUDA_HOME)/include/cuda.h),$(wildcard $(CUDA_HOME)/include/nvtx3/nvToolsExt.h))
CUDA_LIB  := $(firstword $(wildcard $(CUDA_HOME)/lib64/libcudart_static.a $(CUDA_HOME)/targets/x86_64-linux/lib/libcudart_static.a))
ifeq ($(CUDA),auto)
  HAVE_CUDA := $(if $(CUDA_HEADERS),1)
else ifeq ($(CUDA),yes)
  HAVE_CUDA := 1
  $(if $(CUDA_HEADERS),,$(error CUDA=yes, but no include/cuda.h and include/nvtx3/nvToolsExt.h in CUDA_HOME='$(CUDA_HOME)'))
else
  HAVE_CUDA :=
endif

override CPPFLAGS += -Iinclude -Ilib -D_GNU_SOURCE
# A warning ends the build in CI, and with the compiler that CI has: another one may warn of what nobody has seen yet.
WERROR     = $(if $(or $(CI),$(filter 12,$(shell $(CXX) -dumpversion 2>/dev/null))),-Werror)
STD        = -std=c++20 -Wall -Wextra -Wshadow -Wnon-virtual-dtor $(WERROR) -fPIC -fvisibility=hidden -pthread
CSTD       = -std=c99 -Wall -Wextra $(WERROR) -pthread
SANFLAGS   = $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer)
DEPS       = -MMD -MP
LIBS       = -luring -lnuma -llz4 -lzstd -lxxhash -ldl -lrt -pthread
ifdef HAVE_CUDA
override CPPFLAGS += -DVMEM_HAVE_CUDA=1 -isystem $(CUDA_HOME)/include
endif

# Objects depend on this file: it changes when the compiler or its flags do. What a warning does is none of them.
FLAGS_NOW := $(foreach WERROR,-Werror,$(CXX) $(CC) $(STD) $(CSTD) $(CXXFLAGS) $(CFLAGS) $(CPPFLAGS) $(SANFLAGS) $(SAN_TESTS)$(if $(SIM), SIM))
ifeq ($(filter-out clean help setup,$(or $(MAKECMDGOALS),all)),)
else ifneq ($(file <$(BUILD)/flags),$(FLAGS_NOW))
  $(shell mkdir -p $(BUILD))
  $(file >$(BUILD)/flags,$(FLAGS_NOW))
endif

# ---- what there is: folders are picked up as they appear ------------------------------------------------------------------
LIB_SRC   := $(wildcard lib/*/*.cpp lib/*/*/*.cpp)
LIB_SRC   := $(if $(HAVE_CUDA),$(LIB_SRC),$(filter-out lib/device/cuda/% lib/device/managed/cuda_%,$(LIB_SRC)))
# The simulated device is for tests: a library has it with SIM=yes, and in its place one file that refuses otherwise.
SIM_OBJ   := $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard lib/device/sim/sim_*.cpp))
LIB_OBJ   := $(filter-out $(if $(SIM),%/no_sim.o,$(SIM_OBJ)),$(LIB_SRC:%.cpp=$(BUILD)/%.o))
SIM_LIB_OBJ := $(filter-out %/no_sim.o $(SIM_OBJ),$(LIB_OBJ)) $(SIM_OBJ)
# What test programs have of their own, before the library: parts that break on demand, and the functions that put them there.
TEST_OBJ  := $(SIM_OBJ) $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard tests/common/*.cpp))
UNIT_SRC  := $(wildcard tests/unit/*.cpp tests/unit/*/*.cpp)
SYS_SRC   := $(wildcard tests/system/*.cpp)
CTL_SRC   := $(wildcard tests/ctl/*.cpp)
# Headers that a compiler reads once and not for each source: a third of its time. With sanitizers only, so that a source that lacks an
# include is found by the build without them; GCC only, and where ccache does not stand before it, which would have to be told.
PCH       ?= $(if $(SAN),$(if $(findstring ccache,$(CXX) $(realpath $(shell command -v $(firstword $(CXX))))),,$(if $(shell $(CXX) --version 2>/dev/null | grep 'Free Software'),yes)))
PCH_LIB   := algorithm array atomic chrono condition_variable cstring functional map memory mutex optional span string thread unordered_map utility vector
PCH_TESTS := $(PCH_LIB) filesystem fstream random set gtest/gtest.h
PCH_UNITS := unit system ctl
# In unit and system tests alone: calls of libc that end the program where they are called wrongly.
CHECK_OBJ := $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard tests/common/checked/*.cpp))
UNIT_OBJ  := $(UNIT_SRC:%.cpp=$(BUILD)/%.o) $(CHECK_OBJ)
SYS_OBJ   := $(SYS_SRC:%.cpp=$(BUILD)/%.o) $(CHECK_OBJ)
CTL_OBJ   := $(CTL_SRC:%.cpp=$(BUILD)/%.o)
# Of vmemctl, what its tests call themselves.
CTL_PARTS := $(addprefix $(BUILD)/tools/vmemctl/,common.o metrics.o persons.o processes.o publications.o view.o)
# One binary a source file.
EXAMPLES  := $(patsubst %.cpp,$(BUILD)/%,$(wildcard examples/*.cpp))
STRESS    := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/stress/*.cpp))
BENCH     := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/bench/*.cpp))
KMOD_TEST := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/kmod/*.cpp))
VM_TEST   := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/vm/*.cpp))
# The examples' readers of files, without the library.
FORMATS   := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/examples/*.cpp))
ABI       := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/abi/*.c)) $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/abi/*.cpp))
# tools/NAME.cpp is a tool; so is a folder tools/NAME with a main.cpp or NAME.cpp in it.
TOOL_DIRS := $(sort $(foreach d,$(wildcard tools/*/),$(if $(wildcard $(d)main.cpp $(d)$(notdir $(d:/=)).cpp),$(d:/=))))
TOOLS     := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tools/*.cpp)) $(foreach d,$(TOOL_DIRS),$(BUILD)/$(d)/$(notdir $(d)))
GPU_SRC   := $(wildcard tests/gpu/*.cu tests/gpu/*.cpp)

SETUP      = $(BUILD)/.setup-$(1)
# Only these install what is missing; every other goal says what that is, and how to install it.
INSTALL   := $(filter demo test,$(MAKECMDGOALS))
LINK       = $(CXX) $(SANFLAGS) $(CXXFLAGS) $(LDFLAGS)

.PHONY: all
all: lib examples tools  ## the library, static and shared, examples, tools (tests: make build-tests)
.PHONY: lib examples tools build-tests
lib: $(BUILD)/libvmem.a $(BUILD)/libvmem.so $(BUILD)/libvmem-cuda-calls.so
examples: $(EXAMPLES)
tools: $(TOOLS)
build-tests: $(BUILD)/sim/libvmem.so $(if $(UNIT_SRC),$(BUILD)/tests/unit_tests) $(if $(SYS_SRC),$(BUILD)/tests/system_tests) $(if $(CTL_SRC),$(BUILD)/tests/ctl_tests) $(STRESS) $(BENCH) $(KMOD_TEST) $(VM_TEST) $(FORMATS) $(ABI)  ## all test and benchmark programs

# What the sanitizers and the fast lane of .ci/run take.
.PHONY: core-tests
CORE_SUITES ?= unit system stress
core-tests: $(if $(filter unit,$(CORE_SUITES)),$(BUILD)/tests/unit_tests) $(if $(filter system,$(CORE_SUITES)),$(BUILD)/tests/system_tests) $(if $(filter stress,$(CORE_SUITES)),$(STRESS))

# ---- rules ----------------------------------------------------------------------------------------------------------------
# By name: a rule that finds no file beside it, nor a rule for one, gives way to a more general rule for its target.
# The mark of a group stays only where nothing of it is missing (3: something is, and the build may do without).
$(foreach group,build test check vm model package bench wheel,$(call SETUP,$(group))): $(BUILD)/.setup-%: scripts/setup.sh $(if $(INSTALL),ask)
	@mkdir -p $(@D)
	@$(if $(NO_SETUP),touch $@,scripts/setup.sh --quiet$(if $(INSTALL),, --check) $* && touch $@ || [ $$? -eq 3 ])
.PHONY: ask

$(BUILD)/%.o: %.cpp $(BUILD)/flags | $(call SETUP,build)
	@mkdir -p $(@D)
	$(call say,C++,$<)
	$(Q)$(CXX) $(CPPFLAGS) $(STD) $(SANFLAGS) $(CXXFLAGS) $(DEPS) $(READ_ONCE) -c $< -o $@
$(BUILD)/tests/%.o: tests/%.cpp $(BUILD)/flags | $(call SETUP,build) $(call SETUP,test)
	@mkdir -p $(@D)
	$(call say,C++,$<)
	$(Q)$(CXX) $(CPPFLAGS) -Itools -Itests $(STD) $(SANFLAGS) $(CXXFLAGS) $(DEPS) $(READ_ONCE) -c $< -o $@
# A call may find no more stack than lib/core/stack.h keeps for it; sanitizers make every frame larger.
$(BUILD)/lib/%.o: STD += $(if $(SAN),,-Wframe-larger-than=20480)
# GoogleTest's macros are most of a test, and optimising them was most of a build; what they test is optimised. With the
# checks of AddressSanitizer and UBSan in them that took three times as long as not optimising them does.
$(BUILD)/tests/unit/%.o $(BUILD)/tests/ctl/%.o $(BUILD)/tests/system/%.o: override CXXFLAGS += $(if $(findstring address,$(SAN)),-O0,-Og)
$(BUILD)/tests/unit/%.o $(BUILD)/tests/ctl/%.o $(BUILD)/tests/system/%.o: SAN := $(SAN_TESTS)
# With the flags of the source that wants it first, which all others of its folder have.
$(BUILD)/pch/%.h.gch: $(BUILD)/flags | $(call SETUP,build) $(call SETUP,test)
	@mkdir -p $(@D)
	$(call say,PCH,$@)
	$(Q)printf '#include <%s>\n' $(if $(filter lib,$*),$(PCH_LIB),$(PCH_TESTS)) >$(@:.gch=)
	$(Q)$(CXX) $(CPPFLAGS) $(STD) $(SANFLAGS) $(CXXFLAGS) -x c++-header $(@:.gch=) -o $@
define READ_ONCE_BY
$(1): READ_ONCE = -include $(BUILD)/pch/$(2).h
$(1): | $(BUILD)/pch/$(2).h.gch
endef
ifeq ($(PCH),yes)
$(foreach unit,$(PCH_UNITS),$(eval $(call READ_ONCE_BY,$(filter $(BUILD)/tests/$(unit)/%,$(UNIT_OBJ) $(SYS_OBJ) $(CTL_OBJ)),$(unit))))
$(eval $(call READ_ONCE_BY,$(filter-out $(BUILD)/lib/store/digest_%,$(LIB_OBJ) $(SIM_OBJ)),lib))
endif
# ThreadSanitizer cannot see that the kernel holds writers out of a block while it is hashed (write protection, or the
# block is taken out of the region): every such hash would be reported against the program's stores.
$(BUILD)/lib/store/digest_%.o: SANFLAGS = $(if $(filter-out thread,$(SAN)),-fsanitize=$(SAN) -fno-omit-frame-pointer)
$(BUILD)/examples/%.o $(BUILD)/tools/%.o: CPPFLAGS += -Itools $(if $(CUDA_LIB),,-UVMEM_HAVE_CUDA)
$(BUILD)/%.o: %.c $(BUILD)/flags | $(call SETUP,build)
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(CPPFLAGS) $(CSTD) $(SANFLAGS) $(CFLAGS) $(DEPS) -c $< -o $@

$(BUILD)/libvmem.a: $(LIB_OBJ)
	@rm -f $@
	$(call say,AR,$@)
	$(Q)ar rcs $@ $^

# nodelete: threads and signal handlers outlive a dlclose. exclude-libs: what is linked in statically stays inside.
$(BUILD)/$(SONAME): $(LIB_OBJ) lib/api/libvmem.map
	$(call say,LINK,$@)
	$(Q)$(LINK) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=lib/api/libvmem.map -Wl,-z,defs -Wl,-z,nodelete \
	  -Wl,-z,relro -Wl,--exclude-libs,ALL $(LIB_OBJ) $(LIBS) -o $@
$(BUILD)/libvmem.so: $(BUILD)/$(SONAME)
	@ln -sf $(SONAME) $@
# For LD_PRELOAD. It has neither libvmem nor CUDA in it: docs/device-tier.md.
PRELOAD   := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tools/preload/*.c))
$(PRELOAD): CSTD += -fPIC -fvisibility=hidden
$(PRELOAD): CPPFLAGS += -DVMEM_SONAME='"$(SONAME)"'
$(BUILD)/libvmem-cuda-calls.so: $(PRELOAD)
	$(call say,LINK,$@)
	$(Q)$(CC) $(SANFLAGS) $(CFLAGS) $(LDFLAGS) -shared -Wl,-soname,libvmem-cuda-calls.so -Wl,-z,defs -Wl,-z,relro $^ -ldl -o $@
# For the Python package's tests.
$(BUILD)/sim/$(SONAME): $(SIM_LIB_OBJ) lib/api/libvmem.map
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(LINK) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=lib/api/libvmem.map -Wl,-z,defs -Wl,-z,nodelete \
	  -Wl,-z,relro -Wl,--exclude-libs,ALL $(SIM_LIB_OBJ) $(LIBS) -o $@
$(BUILD)/sim/libvmem.so: $(BUILD)/sim/$(SONAME)
	@ln -sf $(SONAME) $@

$(BUILD)/tests/unit_tests: $(UNIT_OBJ) $(TEST_OBJ) $(BUILD)/libvmem.a
$(BUILD)/tests/system_tests: $(SYS_OBJ) $(TEST_OBJ) $(BUILD)/libvmem.a
$(BUILD)/tests/ctl_tests: $(CTL_OBJ) $(CTL_PARTS) $(TEST_OBJ) $(BUILD)/libvmem.a | $(BUILD)/tools/vmemctl/vmemctl
$(BUILD)/tests/unit_tests $(BUILD)/tests/system_tests $(BUILD)/tests/ctl_tests:
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -lgtest_main -lgtest $(LIBS) -o $@
# GoogleTest's main is taken only by those who have none.
$(STRESS) $(KMOD_TEST) $(VM_TEST): $(BUILD)/%: $(BUILD)/%.o $(TEST_OBJ) $(BUILD)/libvmem.a
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -lgtest_main -lgtest $(LIBS) -o $@
$(BENCH): $(BUILD)/%: $(BUILD)/%.o $(TEST_OBJ) $(BUILD)/libvmem.a
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -lbenchmark $(LIBS) -o $@
# With the simulated device, which some of them take for --device sim.
$(EXAMPLES) $(patsubst %.cpp,$(BUILD)/%,$(wildcard tools/*.cpp)): $(BUILD)/%: $(BUILD)/%.o $(SIM_OBJ) $(BUILD)/libvmem.a
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ $(LIBS) $(if $(HAVE_CUDA),$(CUDA_LIB)) -o $@
$(FORMATS): $(BUILD)/%: $(BUILD)/%.o
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -o $@
define tool_folder
$(BUILD)/$(1)/$(notdir $(1)): $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard $(1)/*.cpp)) $(SIM_OBJ) $(BUILD)/libvmem.a
	$$(call say,LINK,$$@)
	$$(Q)$$(LINK) $$^ $$(LIBS) $$(LIBS_$(notdir $(1))) -o $$@
endef
LIBS_vmemctl = -lmicrohttpd
$(foreach d,$(TOOL_DIRS),$(eval $(call tool_folder,$(d))))
# These see the library as an application does: the shared one, by its development name.
$(ABI): $(BUILD)/%: $(BUILD)/%.o $(BUILD)/libvmem.so
	$(call say,LINK,$@)
	$(Q)$(LINK) $< -L$(BUILD) -lvmem -Wl,-rpath,'$$ORIGIN/../..' -lgtest_main -lgtest -pthread -o $@

-include $(shell find $(BUILD)/lib $(BUILD)/tests $(BUILD)/tools $(BUILD)/examples -name '*.d' 2>/dev/null)

# ---- negative controls: make BREAK=NAME build/negative/NAME/unit_tests is that program with one protection taken out of the
# library (lib/core/break.h); only the files that name it are compiled again. tests/negative/run.sh runs them.
ifdef BREAK
BREAK_DIR := $(BUILD)/negative/$(BREAK)
BREAK_SRC := $(shell grep -lF 'broken("$(BREAK)")' $(LIB_SRC))
$(if $(BREAK_SRC),,$(error BREAK=$(BREAK): no file of lib names this protection))
BREAK_OBJ := $(BREAK_SRC:%.cpp=$(BREAK_DIR)/%.o)
$(BREAK_OBJ): $(BREAK_DIR)/%.o: %.cpp $(BUILD)/%.o
	@mkdir -p $(@D)
	$(call say,C++,$< without $(BREAK))
	$(Q)$(CXX) $(CPPFLAGS) -DVMEM_BREAK='"$(BREAK)"' $(STD) $(SANFLAGS) $(CXXFLAGS) -c $< -o $@
$(BREAK_DIR)/libvmem.a: $(BREAK_OBJ) $(LIB_OBJ)
	@rm -f $@
	$(Q)ar rcs $@ $(BREAK_OBJ) $(filter-out $(BREAK_SRC:%.cpp=$(BUILD)/%.o),$(LIB_OBJ))
$(BREAK_DIR)/unit_tests: $(UNIT_OBJ) $(TEST_OBJ) $(BREAK_DIR)/libvmem.a
$(BREAK_DIR)/system_tests: $(SYS_OBJ) $(TEST_OBJ) $(BREAK_DIR)/libvmem.a
$(patsubst tests/stress/%.cpp,$(BREAK_DIR)/%,$(wildcard tests/stress/*.cpp)): $(BREAK_DIR)/%: $(BUILD)/tests/stress/%.o $(TEST_OBJ) $(BREAK_DIR)/libvmem.a
$(BREAK_DIR)/power_loss: $(BUILD)/tests/vm/power_loss.o $(TEST_OBJ) $(BREAK_DIR)/libvmem.a
$(addprefix $(BREAK_DIR)/,unit_tests system_tests power_loss $(patsubst tests/stress/%.cpp,%,$(wildcard tests/stress/*.cpp))):
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -lgtest_main -lgtest $(LIBS) -o $@
endif

# ---- GPU tests run on another machine: nothing but the C library and the driver is taken from there ----------------------
# tests/gpu/NAME_test.cu, NAME_bench.cu (or .cpp) become binaries; other files there are linked into each of them.
GPU_MAIN  := $(filter %_test.cu %_bench.cu %_test.cpp %_bench.cpp,$(GPU_SRC))
GPU_BIN   := $(patsubst tests/gpu/%,$(BUILD)/gpu/%,$(basename $(GPU_MAIN)))
GPU_OBJ    = $(patsubst %,$(BUILD)/%.o,$(basename $(filter-out $(GPU_MAIN) tests/gpu/stress_%,$(GPU_SRC))))
# The stress programs that know devices, with real ones linked in.
GPU_STRESS := $(BUILD)/gpu/stress/history $(BUILD)/gpu/stress/model
GPU_LIBS   = -l:libgtest_main.a -l:libgtest.a -l:liburing.a -l:libnuma.a -l:liblz4.a -l:libzstd.a -l:libxxhash.a
$(BUILD)/tests/gpu/%.o: tests/gpu/%.cu $(BUILD)/flags | $(call SETUP,build) $(call SETUP,test)
	@mkdir -p $(@D)
	$(call say,NVCC,$<)
	$(Q)$(CUDA_HOME)/bin/nvcc -ccbin $(CXX) -std=c++20 -arch=$(GPU_ARCH) -O2 -g -lineinfo $(CPPFLAGS) -Itools -Itests -MMD -MP -Xcompiler -fPIC,-pthread -c $< -o $@
$(GPU_BIN): $(BUILD)/gpu/%: $(BUILD)/tests/gpu/%.o $(GPU_OBJ) $(TEST_OBJ) $(BUILD)/libvmem.a
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -static-libstdc++ -static-libgcc $(GPU_LIBS) $(CUDA_LIB) -ldl -lrt -pthread -o $@
GPU_EXAMPLES := $(BUILD)/gpu/vmem-stream $(BUILD)/gpu/vmem-gemm
$(GPU_EXAMPLES): $(BUILD)/gpu/%: $(BUILD)/examples/%.o $(SIM_OBJ) $(BUILD)/libvmem.a
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -static-libstdc++ -static-libgcc $(GPU_LIBS) $(CUDA_LIB) -ldl -lrt -pthread -o $@
# Benchmarks of the host tier: that machine is often the quieter one.
GPU_HOST := $(BUILD)/gpu/host/host_bench $(BUILD)/gpu/host/programs_bench
$(GPU_HOST): $(BUILD)/gpu/host/%: $(BUILD)/tests/bench/%.o $(TEST_OBJ) $(BUILD)/libvmem.a
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -static-libstdc++ -static-libgcc $(GPU_LIBS) $(CUDA_LIB) -ldl -lrt -pthread -o $@
$(GPU_STRESS): $(BUILD)/gpu/%: $(BUILD)/tests/%.o $(BUILD)/tests/gpu/stress_work.o $(TEST_OBJ) $(BUILD)/libvmem.a
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -static-libstdc++ -static-libgcc $(GPU_LIBS) $(CUDA_LIB) -ldl -lrt -pthread -o $@
.PHONY: gpu-tests
gpu-tests: $(GPU_BIN) $(GPU_STRESS) $(GPU_EXAMPLES) $(GPU_HOST)  ## tests/gpu for a machine with a GPU, into $(BUILD)/gpu (needs the CUDA toolkit)
	$(if $(and $(HAVE_CUDA),$(CUDA_LIB)),,$(error gpu-tests needs the CUDA toolkit; CUDA_HOME='$(CUDA_HOME)'))

# These build in a make of their own: two of them at once would write the same files.
ifneq ($(filter check unit test test-sanitizers,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif

# ---- running --------------------------------------------------------------------------------------------------------------
.PHONY: setup demo unit test test-sanitizers bench check docs kmod debug-kernel wheel install clean help
setup:  ## install the packages that everything here needs (asks nothing; prints the command when not root); GROUPS=: scripts/setup.sh
	scripts/setup.sh $(or $(GROUPS),build test check vm)

# 77: there is nothing to run it on, and it has said so.
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

check: | $(call SETUP,check)  ## format, layers, clang-tidy, shellcheck, header, exported names, documents, manual pages, Python
	@$(MAKE) all build-tests
	@BUILD=$(BUILD) scripts/check.sh $(ONLY)

# clang-tidy runs again only for files whose object was made again, and whose contents are not those of a run that found nothing.
# TIDY_ONLY: these files alone.
TIDY_SRC  := $(LIB_SRC) $(wildcard tools/*.cpp tools/*/*.cpp examples/*.cpp)
TIDY      := $(patsubst %.cpp,$(BUILD)/tidy/%.ok,$(if $(filter undefined,$(origin TIDY_ONLY)),$(TIDY_SRC),$(filter $(TIDY_ONLY),$(TIDY_SRC))))
.PHONY: tidy
tidy: $(TIDY)
$(BUILD)/tidy/%.ok: %.cpp $(BUILD)/%.o .clang-tidy
	@mkdir -p $(@D)
	@echo "clang-tidy $<"
	@scripts/lib/once.sh $(BUILD)/$*.d clang-tidy --quiet $< -- $(CPPFLAGS) -Itools -std=c++20 2>$@.err >$@.out || { cat $@.out; grep -v 'warnings generated' $@.err; exit 1; }
	@touch $@

# What another compiler says, without code: make syntax CXX=g++-14 (scripts/compilers.sh --syntax).
SYNTAX    := $(TIDY_SRC:%.cpp=$(BUILD)/syntax/%.ok)
.PHONY: syntax
syntax: $(SYNTAX)
$(BUILD)/syntax/%.ok: %.cpp $(BUILD)/flags | $(call SETUP,build)
	@mkdir -p $(@D)
	$(call say,SYN,$<)
	$(Q)$(CXX) $(CPPFLAGS) -Itools $(STD) -fsyntax-only $<
	@touch $@

# Threads of the library run on while the process exits: nothing of it may be made or destroyed by the C++ runtime. And
# what a lock protects is accessed with it held (lib/core/mutex.h).
STATICS   := $(LIB_SRC:%.cpp=$(BUILD)/statics/%.ok)
.PHONY: statics
statics: $(STATICS)
$(BUILD)/statics/%.ok: %.cpp $(BUILD)/%.o
	@mkdir -p $(@D)
	@scripts/lib/once.sh $(BUILD)/$*.d clang++ -fsyntax-only $(CPPFLAGS) -std=c++20 -Wno-everything -Werror=exit-time-destructors -Werror=global-constructors -Werror=thread-safety $<
	@touch $@

docs: $(BUILD)/tools/docgen  ## write the generated pages (docs/settings.md, docs/man/*.3, *.7)
	$(BUILD)/tools/docgen docs

# A manual page of each call of vmem.h. Of section 3vmem: PMDK's libvmem has pages vmem_create.3 and vmem_free.3.
$(BUILD)/man/made: $(BUILD)/tools/docgen include/vmem/vmem.h
	$(call say,MAN,$(@D))
	$(Q)rm -rf $(@D) && mkdir -p $(@D) && $(BUILD)/tools/docgen --calls $(@D) && touch $@

kmod:  ## the kernel module against KDIR= (default: the running kernel's headers)
	$(MAKE) -C kmod KDIR="$(KDIR)" modules

debug-kernel:  ## build the KASAN + lockdep kernel the VM tests use (12 CPU-minutes), into the cache
	@$(if $(NO_SETUP),,scripts/setup.sh --quiet --check kernel || [ $$? -eq 3 ])
	scripts/vm/build-debug-kernel.sh

# The library of a wheel has to run where none of the packages it was built with are: what can be is linked into it. Of
# libnuma there is no archive that a shared library can take: a copy lies beside it. The simulated device is in it.
WHEEL_LIBS = -static-libstdc++ -static-libgcc -l:liburing.a -l:liblz4.a -l:libzstd.a -l:libxxhash.a -lnuma -ldl -lrt -pthread
# Whoever hands a wheel on hands these on too: what Debian and Ubuntu keep of the licences, and the text that libnuma's names.
WHEEL_LICENCES = $(wildcard $(patsubst %,/usr/share/doc/%/copyright,liburing-dev liblz4-dev libzstd-dev libxxhash-dev libnuma1) \
  $(lastword $(sort $(wildcard /usr/share/doc/libstdc++-*-dev/copyright))) /usr/share/common-licenses/LGPL-2.1)
# gc-sections: what nobody calls of the C++ library would ask for a newer C library.
$(BUILD)/wheel/$(SONAME): $(SIM_LIB_OBJ) lib/api/libvmem.map
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(LINK) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=lib/api/libvmem.map -Wl,-z,defs -Wl,-z,nodelete -Wl,--gc-sections \
	  -Wl,-z,relro -Wl,--exclude-libs,ALL -Wl,--strip-debug -Wl,-rpath,'$$ORIGIN' $(SIM_LIB_OBJ) $(WHEEL_LIBS) -o $@
wheel: $(BUILD)/wheel/$(SONAME) | $(call SETUP,wheel)  ## a Python wheel with the library in it, for pip: $(BUILD)/wheel/*.whl
	@rm -f $(BUILD)/wheel/*.whl
	@python3 scripts/wheel.py $(BUILD)/wheel $< "$$($(CXX) -print-file-name=libnuma.so.1)" --licences $(WHEEL_LICENCES)

# Debian packages of what is built; FRESH=1 compiles it again with the distribution's flags.
DEB       ?= $(BUILD)/deb
.PHONY: deb again
deb: $(DEB)/made  ## Debian packages, for this machine's release: $(DEB)/*.deb (docs/install.md)
	@ls $(DEB)/*.deb
DEB_SRC := $(wildcard packages/*/* packages/*/*/* scripts/package/* include/vmem/* include/vmem/*/* kmod/*.[ch] kmod/*/*.c kmod/Kbuild kmod/Makefile kmod/dkms.conf python/vmem/* python/vmem/*/* docs/*.md docs/*/* examples/hello.cpp scripts/deb.sh scripts/wheel.py CHANGELOG.md)
$(DEB)/made: $(BUILD)/libvmem.a $(BUILD)/$(SONAME) $(BUILD)/libvmem-cuda-calls.so $(BUILD)/tools/vmemctl/vmemctl $(BUILD)/man/made $(filter-out %/__pycache__ %.pyc,$(DEB_SRC)) $(if $(FRESH),again) | $(call SETUP,package)
	$(call say,DEB,$(DEB))
	@rm -rf $(DEB)/stage && mkdir -p $(DEB)/stage
	$(Q)$(MAKE) install DESTDIR=$(abspath $(DEB))/stage PREFIX=/usr LIBDIR=/usr/lib/$$(dpkg-architecture -qDEB_HOST_MULTIARCH) MANDIR=/usr/share/man LINK_NAME=vmem-tier >$(DEB)/install.log
	$(Q)VMEM_CUDA=$(CUDA) scripts/deb.sh $(DEB) $(VERSION) $(if $(FRESH),,$(DEB)/stage) >/dev/null
	@rm -rf $(DEB)/stage && touch $@

# What the development link and the archive are called: lib$(LINK_NAME).so, .a.
LINK_NAME ?= vmem
INSTALL_LIB := $(DESTDIR)$(LIBDIR)
MANDIR    ?= $(PREFIX)/share/man
INSTALL_MAN := $(DESTDIR)$(MANDIR)
install: lib $(BUILD)/tools/vmemctl/vmemctl $(BUILD)/man/made  ## DESTDIR= PREFIX=: headers, libraries, pkg-config file, CMake package, vmemctl, manual pages
	install -d $(INSTALL_LIB)/pkgconfig $(INSTALL_LIB)/cmake/vmem $(INSTALL_LIB)/vmem $(DESTDIR)$(PREFIX)/include/vmem/detail $(DESTDIR)$(PREFIX)/bin $(INSTALL_MAN)/man1 $(INSTALL_MAN)/man3 $(INSTALL_MAN)/man7
	install -m 755 $(BUILD)/tools/vmemctl/vmemctl $(DESTDIR)$(PREFIX)/bin/
	install -m 644 docs/man/*.1 $(INSTALL_MAN)/man1/
	install -m 644 docs/man/*.3 $(BUILD)/man/*.3vmem $(INSTALL_MAN)/man3/
	install -m 644 docs/man/*.7 $(INSTALL_MAN)/man7/
	install -m 644 include/vmem/*.h $(wildcard include/vmem/*.hpp include/vmem/*.cuh) $(DESTDIR)$(PREFIX)/include/vmem/
	install -m 644 include/vmem/detail/* $(DESTDIR)$(PREFIX)/include/vmem/detail/
	install -m 644 $(BUILD)/libvmem.a $(INSTALL_LIB)/lib$(LINK_NAME).a
	install -m 755 $(BUILD)/$(SONAME) $(INSTALL_LIB)/
	install -m 755 $(BUILD)/libvmem-cuda-calls.so $(INSTALL_LIB)/vmem/
	ln -sf $(SONAME) $(INSTALL_LIB)/lib$(LINK_NAME).so
	sed $(SUBST) scripts/package/vmem.pc.in >$(INSTALL_LIB)/pkgconfig/vmem.pc
	sed $(SUBST) scripts/package/vmem-config.cmake.in >$(INSTALL_LIB)/cmake/vmem/vmem-config.cmake
	sed $(SUBST) scripts/package/vmem-config-version.cmake.in >$(INSTALL_LIB)/cmake/vmem/vmem-config-version.cmake
	@$(if $(DESTDIR),,ldconfig 2>/dev/null || :)  # a program finds the library at once, where it went into a folder of the loader's
SUBST = -e 's|@PREFIX@|$(PREFIX)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@VERSION@|$(VERSION)|g' -e 's|@SONAME@|$(SONAME)|g' \
        -e 's|@LINK_NAME@|$(LINK_NAME)|g' -e 's|@PRIVATE_LIBS@|$(LIBS)|g' -e 's|@PRIVATE_LIBS_LIST@|$(LIBS)|g'

clean:  ## remove $(BUILD)
	rm -rf $(BUILD)

help:  ## this list
	@awk -F ':.*##' '/^[a-z][a-z-]*:.*##/{sub(/^ */,"",$$2); printf "  make %-16s %s\n", $$1, $$2}' Makefile
	@echo "Variables: BUILD=$(BUILD) CXX=$(CXX) CXXFLAGS='$(CXXFLAGS)' CUDA=auto|yes|no SAN=address,undefined|thread SIM=yes NO_SETUP=1 WERROR=-Werror V=1 PREFIX= DESTDIR= KDIR= SUITES='unit system ctl abi examples python stress negative vm kmod deb'"
