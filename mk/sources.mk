# The sources, as folders have them: a new file is picked up by itself.

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
