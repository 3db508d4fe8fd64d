# Rules for objects and for the library.

# One rule a group, by name: make skips a pattern rule whose prerequisite it neither finds nor can
# make, and takes a more general rule for the target. The group's mark remains only if no package is
# missing (status 3: one is, and the build may do without).
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
# A call uses at most the stack that lib/core/stack.h reserves; sanitizers make every frame larger.
$(BUILD)/lib/%.o: STD += $(if $(SAN),,-Wframe-larger-than=20480)
# GoogleTest's macros are most of a test and took most of the build to optimise; the tested code is
# optimised. With the checks of AddressSanitizer and UBSan, optimising took three times as long as
# -O0.
$(BUILD)/tests/unit/%.o $(BUILD)/tests/ctl/%.o $(BUILD)/tests/system/%.o: override CXXFLAGS += $(if $(findstring address,$(SAN)),-O0,-Og)
$(BUILD)/tests/unit/%.o $(BUILD)/tests/ctl/%.o $(BUILD)/tests/system/%.o: SAN := $(SAN_TESTS)
# Uses the flags of the first source that needs it; all sources of a folder have the same flags.
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
$(if $(SAN),$(eval $(call READ_ONCE_BY,$(filter-out $(BUILD)/lib/store/digest_%,$(LIB_OBJ) $(SIM_OBJ)),lib)))
endif
# ThreadSanitizer cannot see that the kernel keeps writers out of a block while it is hashed (by
# write protection, or because the block is out of the region), and would report every such hash as
# a race with the program's stores.
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

# nodelete: threads and signal handlers outlive a dlclose. exclude-libs: symbols of static libraries
# stay internal.
$(BUILD)/$(SONAME): $(LIB_OBJ) lib/api/libvmem.map
	$(call say,LINK,$@)
	$(Q)$(LINK) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=lib/api/libvmem.map -Wl,-z,defs -Wl,-z,nodelete \
	  -Wl,-z,relro -Wl,--exclude-libs,ALL $(LIB_OBJ) $(LIBS) -o $@
$(BUILD)/libvmem.so: $(BUILD)/$(SONAME)
	@ln -sf $(SONAME) $@
# For LD_PRELOAD. It links neither libvmem nor CUDA: docs/device-tier.md.
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

-include $(shell find $(BUILD)/lib $(BUILD)/tests $(BUILD)/tools $(BUILD)/examples -name '*.d' 2>/dev/null)
