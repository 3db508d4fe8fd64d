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

#ifndef VMEM_HAVE_VM_FLAGS_SET
static inline void vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}
#endif

#ifndef VMEM_HAVE_EVENTFD_SIGNAL_ONE_ARG
#define eventfd_signal(eventfd) eventfd_signal(eventfd, 1)
#endif

/* Drops whatever lock the fault came with, mmap_lock or the mapping's own. */
#ifndef VMEM_HAVE_RELEASE_FAULT_LOCK
static inline void release_fault_lock(struct vm_fault *vmf)
{
	mmap_read_unlock(vmf->vma->vm_mm);
}
#endif

/* Page table entries that map any part of the folio; exact under the folio's lock. */
static inline long vmem_folio_mapcount(struct folio *folio)
{
#ifdef VMEM_HAVE_FOLIO_LARGE_MAPCOUNT
	return folio_mapcount(folio);
#else
	/* folio_mapcount() is not exported here, and the counts differ in meaning. */
	long i, nr = folio_nr_pages(folio);
	long entire = folio_test_large(folio) ? folio_entire_mapcount(folio) : 0, sum = entire;

	for (i = 0; i < nr; i++)
		sum += atomic_read(&folio_page(folio, i)->_mapcount) + 1;
	/* Up to 6.1 each small count of a file folio includes the whole folio's. */
	return __is_defined(VMEM_HAVE_PAGE_DOUBLE_MAP) ? sum - entire * nr : sum;
#endif
}

/* Registers a shrinker like @model, which stays; NULL: no memory. */
static inline struct shrinker *vmem_shrinker_start(struct shrinker *model)
{
#ifdef VMEM_HAVE_SHRINKER_ALLOC
	struct shrinker *shrinker = shrinker_alloc(0, "vmem");

	if (!shrinker)
		return NULL;
	shrinker->count_objects = model->count_objects;
	shrinker->scan_objects = model->scan_objects;
	shrinker->seeks = model->seeks;
	shrinker_register(shrinker);
	return shrinker;
#else
	return register_shrinker(model, "vmem") ? NULL : model;
#endif
}

static inline void vmem_shrinker_stop(struct shrinker *shrinker)
{
#ifdef VMEM_HAVE_SHRINKER_ALLOC
	shrinker_free(shrinker);
#else
	unregister_shrinker(shrinker);
#endif
}

#endif /* VMEM_KMOD_COMPAT_H */
