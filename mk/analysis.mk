# Static analysis: clang-tidy, other compilers, thread safety and static objects.

# clang-tidy runs again only for files whose object was rebuilt and whose contents no clean run has
# seen. TIDY_ONLY: check only these files.
TIDY_SRC  := $(LIB_SRC) $(wildcard tools/*.cpp tools/*/*.cpp examples/*.cpp)
TIDY      := $(patsubst %.cpp,$(BUILD)/tidy/%.ok,$(if $(filter undefined,$(origin TIDY_ONLY)),$(TIDY_SRC),$(filter $(TIDY_ONLY),$(TIDY_SRC))))
.PHONY: tidy
tidy: $(TIDY)
$(BUILD)/tidy/%.ok: %.cpp $(BUILD)/%.o .clang-tidy
	@mkdir -p $(@D)
	@echo "clang-tidy $<"
	@scripts/lib/once.sh $(BUILD)/$*.d clang-tidy --quiet $< -- $(CPPFLAGS) -Itools -std=c++20 2>$@.err >$@.out || { cat $@.out; grep -v 'warnings generated' $@.err; exit 1; }
	@touch $@

# Parses the sources with another compiler, without generating code: make syntax CXX=g++-14
# (scripts/compilers.sh --syntax).
SYNTAX    := $(TIDY_SRC:%.cpp=$(BUILD)/syntax/%.ok)
.PHONY: syntax
syntax: $(SYNTAX)
$(BUILD)/syntax/%.ok: %.cpp $(BUILD)/flags | $(call SETUP,build)
	@mkdir -p $(@D)
	$(call say,SYN,$<)
	$(Q)$(CXX) $(CPPFLAGS) -Itools $(STD) -fsyntax-only $<
	@touch $@

# The library's threads run on while the process exits, so the C++ runtime must construct or destroy
# none of its objects. Data protected by a lock is accessed with the lock held (lib/core/mutex.h).
STATICS   := $(LIB_SRC:%.cpp=$(BUILD)/statics/%.ok)
.PHONY: statics
statics: $(STATICS)
$(BUILD)/statics/%.ok: %.cpp $(BUILD)/%.o
	@mkdir -p $(@D)
	@scripts/lib/once.sh $(BUILD)/$*.d clang++ -fsyntax-only $(CPPFLAGS) -std=c++20 -Wno-everything -Werror=exit-time-destructors -Werror=global-constructors -Werror=thread-safety $<
	@touch $@

# The command of every object, for editors and clang's tools. make prints them and runs none.
.PHONY: compile-commands
compile-commands:  ## compile_commands.json, for editors and clang's tools
	@$(MAKE) -nB V=1 NO_SETUP=1 PCH= all build-tests | awk -v folder='$(CURDIR)' ' \
	  match($$0, / -c [^ ]+ /) { file = substr($$0, RSTART + 4, RLENGTH - 5); gsub(/["\\]/, "\\\\&"); \
	    printf "%s\n{\"directory\": \"%s\", \"file\": \"%s\", \"command\": \"%s\"}", n++ ? "," : "[", folder, file, $$0 } \
	  END { print "\n]" }' >compile_commands.json
