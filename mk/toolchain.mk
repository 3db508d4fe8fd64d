# The compilers, their flags, CUDA, and the packages that a build needs.

# CUDA=auto uses a toolkit if present, yes requires one, no ignores it. The library needs only the
# headers, of CUDA 12 or later, and opens the driver when a device is first used. Examples and tests
# of devices use CUDA's runtime and link it.
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
# Warnings are errors in CI and with CI's compiler; other compilers may give warnings that are not
# known yet.
WERROR     = $(if $(or $(CI),$(filter 12,$(shell $(CXX) -dumpversion 2>/dev/null))),-Werror)
STD        = -std=c++20 -Wall -Wextra -Wshadow -Wnon-virtual-dtor $(WERROR) -fPIC -fvisibility=hidden -pthread
CSTD       = -std=c99 -Wall -Wextra $(WERROR) -pthread
SANFLAGS   = $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer)
DEPS       = -MMD -MP
LIBS       = -luring -lnuma -llz4 -lzstd -lxxhash -ldl -lrt -pthread
ifdef HAVE_CUDA
override CPPFLAGS += -DVMEM_HAVE_CUDA=1 -isystem $(CUDA_HOME)/include
endif

# Objects depend on this file, which changes with the compiler or its flags. WERROR is not among
# them: it changes no object.
FLAGS_NOW := $(foreach WERROR,-Werror,$(CXX) $(CC) $(STD) $(CSTD) $(CXXFLAGS) $(CFLAGS) $(CPPFLAGS) $(SANFLAGS) $(SAN_TESTS)$(if $(SIM), SIM))
ifeq ($(filter-out clean help setup,$(or $(MAKECMDGOALS),all)),)
else ifneq ($(file <$(BUILD)/flags),$(FLAGS_NOW))
  $(shell mkdir -p $(BUILD))
  $(file >$(BUILD)/flags,$(FLAGS_NOW))
endif

SETUP      = $(BUILD)/.setup-$(1)
# Only these targets install missing packages; every other target says what is missing and how to
# install it.
INSTALL   := $(filter demo test,$(MAKECMDGOALS))
LINK       = $(CXX) $(SANFLAGS) $(CXXFLAGS) $(LDFLAGS)
