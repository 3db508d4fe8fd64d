# How a source becomes an object, and objects the library.

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

-include $(shell find $(BUILD)/lib $(BUILD)/tests $(BUILD)/tools $(BUILD)/examples -name '*.d' 2>/dev/null)
