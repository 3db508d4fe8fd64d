# libvmem. `make help` lists the targets. Everything built goes to $(BUILD).
BUILD     ?= build
CXX       ?= g++
CXXFLAGS  ?= -O2 -g
SAN       ?=
CPPFLAGS  += -Iinclude -Ilib -D_GNU_SOURCE
STD        = -std=c++20 -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror -fPIC -fvisibility=hidden -pthread
ifneq ($(SAN),)
STD       += -fsanitize=$(SAN) -fno-omit-frame-pointer
endif
DEPS       = -MMD -MP
LIBS       = -luring -lnuma -llz4 -lzstd -lxxhash -ldl -pthread

LIB_SRC   := $(wildcard lib/*/*.cpp)
LIB_OBJ   := $(LIB_SRC:%.cpp=$(BUILD)/%.o)

.PHONY: all
all: $(BUILD)/libvmem.a

$(BUILD)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS) $(STD) $(CXXFLAGS) $(DEPS) -c $< -o $@

$(BUILD)/libvmem.a: $(LIB_OBJ)
	@mkdir -p $(@D)
	rm -f $@; ar rcs $@ $^

UNIT_SRC  := $(wildcard tests/unit/*.cpp)
UNIT_OBJ  := $(UNIT_SRC:%.cpp=$(BUILD)/%.o)
$(BUILD)/tests/unit_tests: $(UNIT_OBJ) $(BUILD)/libvmem.a
	@mkdir -p $(@D)
	$(CXX) $(STD) $(CXXFLAGS) $^ -o $@ -lgtest -lgtest_main $(LIBS)

.PHONY: unit
unit: $(BUILD)/tests/unit_tests
	timeout -k 3 300 $<

-include $(LIB_OBJ:.o=.d) $(UNIT_OBJ:.o=.d)
