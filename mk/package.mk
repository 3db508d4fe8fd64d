# Manual pages, wheel, Debian packages, installation.

# One manual page for each call of vmem.h. They are in section 3vmem because PMDK's libvmem has
# vmem_create.3 and vmem_free.3.
$(BUILD)/man/made: $(BUILD)/tools/docgen include/vmem/vmem.h
	$(call say,MAN,$(@D))
	$(Q)rm -rf $(@D) && mkdir -p $(@D) && $(BUILD)/tools/docgen --calls $(@D) && touch $@

# A wheel's library must run without the packages it was built with, so libraries are linked
# statically where possible. libnuma has no archive that a shared library can use: a copy lies
# beside it. The simulated device is included.
WHEEL_LIBS = -static-libstdc++ -static-libgcc -l:liburing.a -l:liblz4.a -l:libzstd.a -l:libxxhash.a -lnuma -ldl -lrt -pthread
# Licences that must be distributed with a wheel: the copyright files of Debian and Ubuntu, and the
# text that libnuma's names.
WHEEL_LICENCES = $(wildcard $(patsubst %,/usr/share/doc/%/copyright,liburing-dev liblz4-dev libzstd-dev libxxhash-dev libnuma1) \
  $(lastword $(sort $(wildcard /usr/share/doc/libstdc++-*-dev/copyright))) /usr/share/common-licenses/LGPL-2.1)
# gc-sections: unused functions of the C++ library would require a newer C library.
$(BUILD)/wheel/$(SONAME): $(SIM_LIB_OBJ) lib/api/libvmem.map
	@mkdir -p $(@D)
	$(call say,LINK,$@)
	$(Q)$(LINK) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=lib/api/libvmem.map -Wl,-z,defs -Wl,-z,nodelete -Wl,--gc-sections \
	  -Wl,-z,relro -Wl,--exclude-libs,ALL -Wl,--strip-debug -Wl,-rpath,'$$ORIGIN' $(SIM_LIB_OBJ) $(WHEEL_LIBS) -o $@
wheel: $(BUILD)/wheel/$(SONAME) | $(call SETUP,wheel)  ## a Python wheel with the library in it, for pip: $(BUILD)/wheel/*.whl
	@rm -f $(BUILD)/wheel/*.whl
	@python3 scripts/wheel.py $(BUILD)/wheel $< "$$($(CXX) -print-file-name=libnuma.so.1)" --licences $(WHEEL_LICENCES)

# Debian packages of the existing build; FRESH=1 compiles again with the distribution's flags.
DEB       ?= $(BUILD)/deb
.PHONY: deb again
deb: $(DEB)/made  ## Debian packages, for this machine's release: $(DEB)/*.deb (docs/install.md)
	@ls $(DEB)/*.deb
DEB_SRC := $(wildcard packages/*/* packages/*/*/* scripts/package/* include/vmem/* include/vmem/*/* kmod/*.[ch] kmod/*/*.c kmod/Kbuild kmod/Makefile kmod/dkms.conf python/vmem/* python/vmem/*/* docs/*.md docs/*/* examples/hello.cpp scripts/deb.sh scripts/wheel.py CHANGELOG.md)
$(DEB)/made: $(BUILD)/libvmem.a $(BUILD)/$(SONAME) $(BUILD)/libvmem-cuda-calls.so $(BUILD)/tools/vmemctl/vmemctl $(BUILD)/man/made $(filter-out %/__pycache__ %.pyc,$(DEB_SRC)) $(if $(FRESH),again) | $(call SETUP,package)
	$(call say,DEB,$(DEB))
	@rm -rf $(DEB)/stage && mkdir -p $(DEB)/stage
	$(Q)$(MAKE) install DESTDIR=$(abspath $(DEB))/stage PREFIX=/usr LIBDIR=/usr/lib/$$(dpkg-architecture -qDEB_HOST_MULTIARCH) MANDIR=/usr/share/man LINK_NAME=vmem-tier STRIP=no >$(DEB)/install.log
	$(Q)VMEM_CUDA=$(CUDA) scripts/deb.sh $(DEB) $(VERSION) $(if $(FRESH),,$(DEB)/stage) >/dev/null
	@rm -rf $(DEB)/stage && touch $@

# Installs libraries stripped, with their debug symbols in .debug beside them, where debuggers look.
# STRIP=no: as built.
STRIP     ?= yes
define install_library
	install -m 755 $(1) $(2)/
	$(if $(filter yes,$(STRIP)),install -d $(2)/.debug)
	$(if $(filter yes,$(STRIP)),objcopy --only-keep-debug $(1) $(2)/.debug/$(notdir $(1)).debug)
	$(if $(filter yes,$(STRIP)),objcopy --strip-unneeded --add-gnu-debuglink=$(2)/.debug/$(notdir $(1)).debug $(1) $(2)/$(notdir $(1)))
endef
# The name of the development link and the archive: lib$(LINK_NAME).so, .a.
LINK_NAME ?= vmem
INSTALL_LIB := $(DESTDIR)$(LIBDIR)
MANDIR    ?= $(PREFIX)/share/man
INSTALL_MAN := $(DESTDIR)$(MANDIR)
install: lib $(BUILD)/tools/vmemctl/vmemctl $(BUILD)/man/made  ## DESTDIR= PREFIX= STRIP=no: headers, libraries, pkg-config file, CMake package, vmemctl, manual pages
	install -d $(INSTALL_LIB)/pkgconfig $(INSTALL_LIB)/cmake/vmem $(INSTALL_LIB)/vmem $(DESTDIR)$(PREFIX)/include/vmem/detail $(DESTDIR)$(PREFIX)/bin $(INSTALL_MAN)/man1 $(INSTALL_MAN)/man3 $(INSTALL_MAN)/man7
	install -m 755 $(if $(filter yes,$(STRIP)),-s) $(BUILD)/tools/vmemctl/vmemctl $(DESTDIR)$(PREFIX)/bin/
	install -m 644 docs/man/*.1 $(INSTALL_MAN)/man1/
	install -m 644 docs/man/*.3 $(BUILD)/man/*.3vmem $(INSTALL_MAN)/man3/
	install -m 644 docs/man/*.7 $(INSTALL_MAN)/man7/
	install -m 644 include/vmem/*.h $(wildcard include/vmem/*.hpp include/vmem/*.cuh) $(DESTDIR)$(PREFIX)/include/vmem/
	install -m 644 include/vmem/detail/* $(DESTDIR)$(PREFIX)/include/vmem/detail/
	install -m 644 $(BUILD)/libvmem.a $(INSTALL_LIB)/lib$(LINK_NAME).a
	$(if $(filter yes,$(STRIP)),strip --strip-debug $(INSTALL_LIB)/lib$(LINK_NAME).a)
	$(call install_library,$(BUILD)/$(SONAME),$(INSTALL_LIB))
	$(call install_library,$(BUILD)/libvmem-cuda-calls.so,$(INSTALL_LIB)/vmem)
	ln -sf $(SONAME) $(INSTALL_LIB)/lib$(LINK_NAME).so
	sed $(SUBST) scripts/package/vmem.pc.in >$(INSTALL_LIB)/pkgconfig/vmem.pc
	sed $(SUBST) scripts/package/vmem-config.cmake.in >$(INSTALL_LIB)/cmake/vmem/vmem-config.cmake
	sed $(SUBST) scripts/package/vmem-config-version.cmake.in >$(INSTALL_LIB)/cmake/vmem/vmem-config-version.cmake
	@$(if $(DESTDIR),,ldconfig 2>/dev/null || :)  # a program finds the library at once, where it went into a folder of the loader's
SUBST = -e 's|@PREFIX@|$(PREFIX)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@VERSION@|$(VERSION)|g' -e 's|@SONAME@|$(SONAME)|g' \
        -e 's|@LINK_NAME@|$(LINK_NAME)|g' -e 's|@PRIVATE_LIBS@|$(LIBS)|g' -e 's|@PRIVATE_LIBS_LIST@|$(LIBS)|g'
