// SPDX-License-Identifier: GPL-2.0-only
/* 6.5: a fault may hold a lock of its mapping instead of mmap_lock. */
#include <linux/mm.h>

void probe(struct vm_fault *vmf);
void probe(struct vm_fault *vmf)
{
	release_fault_lock(vmf);
}
