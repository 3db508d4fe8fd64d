/* A C99 program against the shared library: every public call links, in its version, and refuses
 * bad input. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <vmem/vmem.h>

static int failed;

static void expect(int holds, const char* what) {
  if (!holds) {
    printf("FAIL %s: %s\n", what, vmem_last_error());
    failed = 1;
  }
}

int main(void) {
  static const char* const names[] = {
      "vmem_init",
      "vmem_shutdown",
      "vmem_set",
      "vmem_get",
      "vmem_log",
      "vmem_alloc",
      "vmem_map",
      "vmem_free",
      "vmem_discard",
      "vmem_create",
      "vmem_name",
      "vmem_prefetch",
      "vmem_advise",
      "vmem_acquire",
      "vmem_release",
      "vmem_acquire_ranges",
      "vmem_release_ranges",
      "vmem_evict",
      "vmem_sync",
      "vmem_query",
      "vmem_stats",
      "vmem_device_stats",
      "vmem_strerror",
      "vmem_last_error",
      "vmem_version",
      "vmem_lease",
      "vmem_lease_async",
      "vmem_lease_poll",
      "vmem_lease_fd",
      "vmem_lease_end",
      "vmem_kernel_begin",
      "vmem_kernel_end",
      "vmem_export",
      "vmem_flush",
      "vmem_flush_on",
  };
  char value[64];
  Dl_info info;
  size_t i;

  for (i = 0; i < sizeof(names) / sizeof(names[0]); i++)
    expect(dlvsym(RTLD_DEFAULT, names[i], "VMEM_1") != NULL, names[i]);
  expect(dladdr(dlsym(RTLD_DEFAULT, "vmem_init"), &info) && strstr(info.dli_fname, "libvmem-tier.so."),
         "vmem_init comes from libvmem-tier.so");
  expect(vmem_version() == VMEM_VERSION, "the library is of the header's version");
  expect(vmem_sync(NULL, 0) == 0, "without a region there is nothing to sync");
  expect(vmem_flush() == 0, "without a region there is nothing to flush");
  expect(vmem_flush_on(NULL, 0) == -EINVAL, "no signals are -EINVAL");
  expect(vmem_set("no_such_setting", "1") == -ENOENT, "an unknown setting is -ENOENT");
  expect(strstr(vmem_last_error(), "no_such_setting") != NULL, "the message names the setting");
  expect(vmem_get("block_size", value, sizeof(value)) == 0, "a setting can be read");
  expect(vmem_get("block_size", value, 1) == -ERANGE, "a value that does not fit is -ERANGE");
  expect(vmem_free(NULL) == 0, "freeing NULL is nothing");
  expect(vmem_lease_end(NULL, NULL) == 0, "ending no lease is nothing");
  expect(vmem_lease_poll((struct vmem_lease*)&info) == -EINVAL, "what is no lease is -EINVAL");
  expect(vmem_alloc(NULL, 4096, 0) == -EINVAL, "a null result pointer is -EINVAL");
  expect(vmem_strerror(-ENOSPC)[0] != '\0', "an errno has words");
  return failed;
}
