# The sources, by wildcard: new files are picked up automatically.

LIB_SRC   := $(wildcard lib/*/*.cpp lib/*/*/*.cpp)
LIB_SRC   := $(filter-out $(if $(HAVE_CUDA),%/no_cuda.cpp,lib/device/cuda/% lib/device/managed/cuda_%),$(LIB_SRC))
# The simulated device is for tests: SIM=yes includes it in the library; otherwise one file refuses
# it.
SIM_OBJ   := $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard lib/device/sim/sim_*.cpp))
LIB_OBJ   := $(filter-out $(if $(SIM),%/no_sim.o,$(SIM_OBJ)),$(LIB_SRC:%.cpp=$(BUILD)/%.o))
SIM_LIB_OBJ := $(filter-out %/no_sim.o $(SIM_OBJ),$(LIB_OBJ)) $(SIM_OBJ)
# Objects that precede the library in test programs: parts that break on demand, and the functions
# that install them.
TEST_OBJ  := $(SIM_OBJ) $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard tests/common/*.cpp))
UNIT_SRC  := $(wildcard tests/unit/*.cpp tests/unit/*/*.cpp)
SYS_SRC   := $(wildcard tests/system/*.cpp)
CTL_SRC   := $(wildcard tests/ctl/*.cpp)
# Precompiled headers, which take a third of the compile time: of unit, system and control tests, and
# of everything with sanitizers. The library without sanitizers has none, and scripts/compilers.sh
# builds the tests without, so that they find a source that lacks an include. GCC only, and not behind
# ccache, which would need to be configured for them.
PCH       ?= $(if $(findstring ccache,$(CXX) $(realpath $(shell command -v $(firstword $(CXX))))),,$(if $(shell $(CXX) --version 2>/dev/null | grep 'Free Software'),yes))
PCH_LIB   := algorithm array atomic chrono condition_variable cstring functional map memory mutex optional span string thread unordered_map utility vector
PCH_TESTS := $(PCH_LIB) filesystem fstream random set gtest/gtest.h
PCH_UNITS := unit system ctl
# For unit and system tests only: libc functions that abort the program when misused.
CHECK_OBJ := $(patsubst %.cpp,$(BUILD)/%.o,$(wildcard tests/common/checked/*.cpp))
# The short form of a build with AddressSanitizer takes the tests from the build TESTS_OF, which has
# no sanitizer: to compile them again took most of its time. It compiles the library, the tests'
# common parts, and the tests that name the sanitizer.
TESTS_OF  ?= $(BUILD)
SANITIZED := $(if $(filter-out $(BUILD),$(TESTS_OF)),$(shell grep -l __SANITIZE_ADDRESS__ $(UNIT_SRC) $(SYS_SRC)),$(UNIT_SRC) $(SYS_SRC))
test_obj   = $(patsubst %.cpp,$(BUILD)/%.o,$(filter $(SANITIZED),$(1))) $(patsubst %.cpp,$(TESTS_OF)/%.o,$(filter-out $(SANITIZED),$(1)))
UNIT_OBJ  := $(call test_obj,$(UNIT_SRC)) $(CHECK_OBJ)
SYS_OBJ   := $(call test_obj,$(SYS_SRC)) $(CHECK_OBJ)
CTL_OBJ   := $(CTL_SRC:%.cpp=$(BUILD)/%.o)
# The parts of vmemctl that its tests call directly.
CTL_PARTS := $(addprefix $(BUILD)/tools/vmemctl/,common.o metrics.o persons.o processes.o publications.o view.o)
# One binary for each source file.
EXAMPLES  := $(patsubst %.cpp,$(BUILD)/%,$(wildcard examples/*.cpp))
STRESS    := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/stress/*.cpp))
BENCH     := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/bench/*.cpp))
KMOD_TEST := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/kmod/*.cpp))
VM_TEST   := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/vm/*.cpp))
# The examples' file readers, without the library.
FORMATS   := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/examples/*.cpp))
ABI       := $(patsubst %.c,$(BUILD)/%,$(wildcard tests/abi/*.c)) $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/abi/*.cpp))
# tools/NAME.cpp is a tool; so is a folder tools/NAME that contains main.cpp or NAME.cpp.
TOOL_DIRS := $(sort $(foreach d,$(wildcard tools/*/),$(if $(wildcard $(d)main.cpp $(d)$(notdir $(d:/=)).cpp),$(d:/=))))
TOOLS     := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tools/*.cpp)) $(foreach d,$(TOOL_DIRS),$(BUILD)/$(d)/$(notdir $(d)))
GPU_SRC   := $(wildcard tests/gpu/*.cu tests/gpu/*.cpp)
