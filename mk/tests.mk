# Test programs, benchmarks, examples, tools, and the negative controls.

$(BUILD)/tests/unit_tests: $(UNIT_OBJ) $(TEST_OBJ) $(BUILD)/libvmem.a
$(BUILD)/tests/system_tests: $(SYS_OBJ) $(TEST_OBJ) $(BUILD)/libvmem.a
$(BUILD)/tests/ctl_tests: $(CTL_OBJ) $(CTL_PARTS) $(TEST_OBJ) $(BUILD)/libvmem.a | $(BUILD)/tools/vmemctl/vmemctl
# Inline functions that tests of another build (TESTS_OF) have, too, are taken from the library. The
# tests have hooks of their own.
LIB_FIRST := $(if $(filter-out $(BUILD),$(TESTS_OF)),$(filter-out $(SIM_OBJ) %/test_hooks.o,$(SIM_LIB_OBJ)))
$(BUILD)/tests/unit_tests $(BUILD)/tests/system_tests $(BUILD)/tests/ctl_tests:
	$(call say,LINK,$@)
	$(Q)$(LINK) $(LIB_FIRST) $^ -lgtest_main -lgtest $(LIBS) -o $@
# The linker takes GoogleTest's main only for programs without their own.
$(STRESS) $(KMOD_TEST) $(VM_TEST): $(BUILD)/%: $(BUILD)/%.o $(TEST_OBJ) $(BUILD)/libvmem.a
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -lgtest_main -lgtest $(LIBS) -o $@
$(BENCH): $(BUILD)/%: $(BUILD)/%.o $(TEST_OBJ) $(BUILD)/libvmem.a
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -lbenchmark $(LIBS) -o $@
# With the simulated device, which some of them use for --device sim.
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
# These use the library as an application does: the shared one, by its development name.
$(ABI): $(BUILD)/%: $(BUILD)/%.o $(BUILD)/libvmem.so
	$(call say,LINK,$@)
	$(Q)$(LINK) $< -L$(BUILD) -lvmem -Wl,-rpath,'$$ORIGIN/../..' -lgtest_main -lgtest -pthread -o $@

# Negative controls: make BREAK=NAME build/negative/NAME/unit_tests builds that program with one
# protection removed from the library (lib/core/break.h). Only the files that name it are compiled
# again. tests/negative/run.sh runs them.
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
