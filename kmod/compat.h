/* SPDX-License-Identifier: GPL-2.0-only */
/* compat.h - differences of kernels: by what Kbuild finds (probes/), never by version numbers */
#ifndef VMEM_KMOD_COMPAT_H
#define VMEM_KMOD_COMPAT_H

#include <linux/eventfd.h>
#include <linux/list_lru.h>
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

/* Drops the lock that the fault came with: mmap_lock or the mapping's own. */
#ifndef VMEM_HAVE_RELEASE_FAULT_LOCK
static inline void release_fault_lock(struct vm_fault *vmf)
{
	mmap_read_unlock(vmf->vma->vm_mm);
}
#endif

/* Page table entries that map a part of the folio; exact under its lock. Not exported up to 6.9. */
static inline long vmem_folio_mapcount(struct folio *folio)
{
#ifdef VMEM_HAVE_FOLIO_LARGE_MAPCOUNT
	return folio_mapcount(folio);
#else
	long i, nr = folio_nr_pages(folio);
	long entire = folio_test_large(folio) ? folio_entire_mapcount(folio) : 0, sum = entire;

	for (i = 0; i < nr; i++)
		sum += atomic_read(&folio_page(folio, i)->_mapcount) + 1;
	/* Up to 6.1 each small count of a file folio includes the whole folio's. */
	return __is_defined(VMEM_HAVE_PAGE_DOUBLE_MAP) ? sum - entire * nr : sum;
#endif
}

#ifndef VMEM_HAVE_LIST_LRU_ADD_OBJ
#define list_lru_add_obj(lru, item) list_lru_add(lru, item)
#define list_lru_del_obj(lru, item) list_lru_del(lru, item)
#endif

/* Parameters of a callback of list_lru_walk_one(). */
#ifdef VMEM_HAVE_LIST_LRU_WALK_UNLOCKED
#define VMEM_LRU_ITEM struct list_head *item, struct list_lru_one *list, void *arg
#else
#define VMEM_LRU_ITEM struct list_head *item, struct list_lru_one *list, spinlock_t *lock, void *arg
#endif

/* Registers a shrinker like @model, which stays, and its @lru. NULL: no memory. */
static inline struct shrinker *vmem_shrinker_start(struct shrinker *model, struct list_lru *lru)
{
#ifdef VMEM_HAVE_SHRINKER_ALLOC
	struct shrinker *shrinker = shrinker_alloc(model->flags, "vmem");

	if (!shrinker)
		return NULL;
	shrinker->count_objects = model->count_objects;
	shrinker->scan_objects = model->scan_objects;
	shrinker->batch = model->batch;
	shrinker->seeks = model->seeks;
	if (!list_lru_init_memcg(lru, shrinker)) {
		shrinker_register(shrinker);
		return shrinker;
	}
	shrinker_free(shrinker);
#else	/* the list needs the number that a shrinker gets here; there are no frames yet */
#define shrinker_free(shrinker) unregister_shrinker(shrinker)
	if (register_shrinker(model, "vmem"))
		return NULL;
	if (!list_lru_init_memcg(lru, model))
		return model;
	unregister_shrinker(model);
#endif
	return NULL;
}

#endif /* VMEM_KMOD_COMPAT_H */
