# Programs for a machine with a GPU: they take only the C library and the driver from that machine.

# tests/gpu/NAME_test.cu and NAME_bench.cu (or .cpp) become binaries; other files there are linked
# into each of them.
GPU_MAIN  := $(filter %_test.cu %_bench.cu %_test.cpp %_bench.cpp,$(GPU_SRC))
GPU_BIN   := $(patsubst tests/gpu/%,$(BUILD)/gpu/%,$(basename $(GPU_MAIN)))
GPU_OBJ    = $(patsubst %,$(BUILD)/%.o,$(basename $(filter-out $(GPU_MAIN) tests/gpu/stress_%,$(GPU_SRC))))
# The stress programs that use devices, linked with real ones.
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
# Benchmarks of the host tier, because the GPU machine is often the quieter one.
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
