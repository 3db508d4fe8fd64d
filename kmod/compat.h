/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * compat.h - every difference between kernels, chosen by the probes that Kbuild
 * compiles (probes/NAME.c sets VMEM_HAVE_NAME), never by version numbers
 */
#ifndef VMEM_KMOD_COMPAT_H
#define VMEM_KMOD_COMPAT_H

#include <linux/eventfd.h>
#include <linux/mm.h>
#include <linux/shrinker.h>

static inline void vmem_vma_set_flags(struct vm_area_struct *vma, unsigned long flags)
{
#ifdef VMEM_HAVE_VM_FLAGS_SET
	vm_flags_set(vma, flags);
#else
	vma->vm_flags |= flags;
#endif
}

static inline void vmem_eventfd_signal(struct eventfd_ctx *eventfd)
{
#ifdef VMEM_HAVE_EVENTFD_SIGNAL_ONE_ARG
	eventfd_signal(eventfd);
#else
	eventfd_signal(eventfd, 1);
#endif
}

/* Drops whatever lock the fault came with, mmap_lock or the mapping's own. */
static inline void vmem_release_fault_lock(struct vm_fault *vmf)
{
#ifdef VMEM_HAVE_RELEASE_FAULT_LOCK
	release_fault_lock(vmf);
#else
	mmap_read_unlock(vmf->vma->vm_mm);
#endif
}

/* Page table entries that map any part of the folio; exact under the folio's lock. */
static inline int vmem_folio_mapcount(struct folio *folio)
{
#ifdef VMEM_HAVE_FOLIO_LARGE_MAPCOUNT
	return folio_mapcount(folio);
#else
	/* folio_mapcount() is not exported here, and the counts differ in meaning. */
	long i, nr = folio_nr_pages(folio);
	int entire = folio_test_large(folio) ? folio_entire_mapcount(folio) : 0;
	int sum = entire;

	for (i = 0; i < nr; i++)
		sum += atomic_read(&folio_page(folio, i)->_mapcount) + 1;
#ifdef VMEM_HAVE_PAGE_DOUBLE_MAP
	/* Up to 6.1 each small count of a file folio includes the whole folio's. */
	sum -= entire * nr;
#endif
	return sum;
#endif
}

#ifdef VMEM_HAVE_SHRINKER_ALLOC
static inline struct shrinker *vmem_shrinker_new(void)
{
	return shrinker_alloc(0, "vmem");
}

static inline int vmem_shrinker_start(struct shrinker *shrinker)
{
	shrinker_register(shrinker);
	return 0;
}

static inline void vmem_shrinker_stop(struct shrinker *shrinker)
{
	shrinker_free(shrinker);
}
#else
static inline struct shrinker *vmem_shrinker_new(void)
{
	static struct shrinker shrinker;

	return &shrinker;
}

static inline int vmem_shrinker_start(struct shrinker *shrinker)
{
	return register_shrinker(shrinker, "vmem");
}

static inline void vmem_shrinker_stop(struct shrinker *shrinker)
{
	unregister_shrinker(shrinker);
}
#endif

#endif /* VMEM_KMOD_COMPAT_H */
