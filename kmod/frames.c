// SPDX-License-Identifier: GPL-2.0-only
/*
 * frames.c - the memory of pools: allocation, limits, mapping, pins
 *
 * A frame is the size of a block, made of equal, physically contiguous pieces, one
 * where memory allows. It is zeroed before anybody sees it and belongs to its
 * context alone until it is freed.
 */

#include <linux/delay.h>
#include <linux/pagemap.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "vmem.h"

struct page *vmem_frame_page(struct vmem_frame *frame, unsigned long page)
{
	return frame->piece[page >> frame->order] + (page & ((1UL << frame->order) - 1));
}

/*
 * A fault installs its entry under the lock of the piece, after a look at the state
 * under that same lock. So whoever changes the state and then passes through every
 * lock knows: all entries of the old state stand, and unmapping removes them all.
 * May sleep; the caller keeps the frame alive.
 */
void vmem_frame_barrier(struct vmem_frame *frame)
{
	unsigned int i;

	for (i = 0; i < frame->pieces; i++) {
		lock_page(frame->piece[i]);
		unlock_page(frame->piece[i]);
	}
}

/* Pins (FOLL_PIN) on the frame now. Never sleeps. */
unsigned int vmem_frame_pins(struct vmem_frame *frame)
{
	unsigned int i, pins = 0;

	for (i = 0; i < frame->pieces; i++) {
		struct folio *folio = page_folio(frame->piece[i]);

		if (folio_test_large(folio))
			pins += atomic_read(&folio->_pincount);
		else
			pins += folio_ref_count(folio) / GUP_PIN_COUNTING_BIAS;
	}
	return pins;
}

/*
 * Whether anybody holds the frame beyond the module, page tables, pins and @held
 * plain references. Where entries can still come and go (the pool's own mapping) they
 * are told apart under the piece's lock: none is added there, and the references are
 * read first, so one that vanishes in between makes the frame look held, never free.
 */
static bool vmem_frame_held(struct vmem_frame *frame, unsigned int held)
{
	long extra, others = 0;
	unsigned int i;

	for (i = 0; i < frame->pieces; i++) {
		struct folio *folio = page_folio(frame->piece[i]);

		folio_lock(folio);
		extra = folio_ref_count(folio) - 1;
		smp_rmb();	/* references before entries, see above */
		extra -= vmem_folio_mapcount(folio);
		if (folio_test_large(folio))
			extra -= atomic_read(&folio->_pincount);
		else
			extra %= GUP_PIN_COUNTING_BIAS;
		folio_unlock(folio);
		others += max(extra, 0L);
	}
	return others > held;
}

/*
 * Whether the frame is in use: by a pin at once; by a plain reference after some
 * patience, as a fault may be about to give it back. *@patience_us is used up.
 */
bool vmem_frame_pinned(struct vmem_frame *frame, unsigned int base_pins,
		       const unsigned int *held, unsigned int *patience_us)
{
	unsigned int nap_us = 20;

	while (vmem_frame_held(frame, held ? READ_ONCE(*held) : 0)) {
		if (vmem_frame_pins(frame) > base_pins || nap_us > *patience_us)
			return true;
		usleep_range(nap_us, 2 * nap_us);
		*patience_us -= nap_us;
		nap_us *= 2;
	}
	return vmem_frame_pins(frame) > base_pins;
}

/* Whoever still pins a piece keeps the pages of it alive, and nothing else. */
void vmem_frame_free(struct vmem_frame *frame)
{
	s64 bytes = vmem_unit_bytes(frame->pool);
	unsigned int i;

	for (i = 0; i < frame->pieces; i++) {
		struct page *page = frame->piece[i];

		atomic64_sub((s64)PAGE_SIZE << frame->order, &vmem_node_bytes[page_to_nid(page)]);
		ClearPageDirty(page);
		put_page(page);
	}
	vmem_add(vmem_c_frame_bytes, -bytes);
	kvfree(frame);
}

static struct vmem_frame *vmem_frame_alloc(struct vmem_range *pool, unsigned long index, int node,
					   bool strict, unsigned int order)
{
	unsigned int i, pieces = 1U << (pool->unit_shift - order);
	gfp_t gfp = GFP_KERNEL_ACCOUNT | __GFP_ZERO | __GFP_NOWARN;
	struct vmem_frame *frame;

	/* Never the OOM killer: short memory is the runtime's to handle. */
	gfp |= order ? __GFP_COMP | __GFP_NORETRY : __GFP_RETRY_MAYFAIL;
	if (strict)
		gfp |= __GFP_THISNODE;
	frame = kvzalloc(struct_size(frame, piece, pieces), GFP_KERNEL_ACCOUNT);
	if (!frame)
		return NULL;
	frame->pool = pool;
	frame->index = index;
	frame->order = order;
	for (i = 0; i < pieces; i++) {
		struct page *page = alloc_pages_node(node, gfp, order);

		if (!page)
			break;
		/* Core code compares the folio's index with the file's size. */
		page_folio(page)->index = 0;
		frame->piece[i] = page;
		frame->pieces++;
		atomic64_add((s64)PAGE_SIZE << order, &vmem_node_bytes[page_to_nid(page)]);
	}
	if (frame->pieces == pieces)
		return frame;
	/* vmem_frame_free() takes a whole frame off the counter: give it one. */
	vmem_add(vmem_c_frame_bytes, vmem_unit_bytes(pool));
	vmem_frame_free(frame);
	return NULL;
}

/* Limits are charged before memory is asked for; a frame that is freed gives back the machine's. */
static int vmem_charge(struct vmem_ctx *ctx, s64 bytes)
{
	u64 limit = READ_ONCE(vmem_knobs.frame_limit_bytes);
	u64 own = READ_ONCE(vmem_knobs.context_limit_bytes);
	u64 all = atomic64_add_return(bytes, &vmem_counters[vmem_c_frame_bytes]);
	bool ok;

	spin_lock(&ctx->lock);
	ok = (!limit || all <= limit) && (!own || ctx->frame_bytes + bytes <= own);
	if (ok)
		ctx->frame_bytes += bytes;
	spin_unlock(&ctx->lock);
	if (ok)
		return 0;
	vmem_add(vmem_c_frame_bytes, -bytes);
	vmem_count(vmem_c_refused_limit);
	return -EDQUOT;
}

static void vmem_uncharge_ctx(struct vmem_ctx *ctx, u64 bytes)
{
	spin_lock(&ctx->lock);
	ctx->frame_bytes -= bytes;
	spin_unlock(&ctx->lock);
}

static int vmem_populate_slot(struct vmem_ctx *ctx, struct vmem_range *pool, unsigned long index,
			      const struct vmem_populate *arg, bool *scattered)
{
	unsigned int want = min_t(unsigned int, READ_ONCE(vmem_knobs.frame_order), pool->unit_shift);
	u64 bytes = vmem_unit_bytes(pool);
	struct vmem_frame *frame = NULL;
	unsigned int order = want;
	int err;

	err = vmem_charge(ctx, bytes);
	if (err)
		return err;
	for (;;) {
		frame = vmem_frame_alloc(pool, index, arg->node, arg->flags & VMEM_POPULATE_STRICT, order);
		if (frame || !order)
			break;
		order = order > 4 ? 4 : 0;	/* 64 KiB is what an SSD still likes */
	}
	if (!frame) {
		vmem_add(vmem_c_frame_bytes, -(s64)bytes);
		vmem_uncharge_ctx(ctx, bytes);
		return -ENOMEM;
	}
	*scattered = order < want;
	err = xa_insert(&pool->units, index, frame, GFP_KERNEL_ACCOUNT);
	if (!err) {
		spin_lock(&ctx->lock);
		if (pool->dead) {
			xa_erase(&pool->units, index);
			err = -ENXIO;
		}
		spin_unlock(&ctx->lock);
	}
	if (err) {
		vmem_frame_free(frame);
		vmem_uncharge_ctx(ctx, bytes);
		return err == -EBUSY ? -EEXIST : err;
	}
	return 0;
}

/* Checks @count slots from @offset on; the pool referenced, or an error. */
static struct vmem_range *vmem_slots(struct vmem_ctx *ctx, u64 offset, u32 count, unsigned long *index)
{
	struct vmem_range *pool;

	if (!count)
		return ERR_PTR(-EINVAL);
	pool = vmem_range_find(ctx, offset, VMEM_KIND_POOL);
	if (!pool)
		return ERR_PTR(-ENXIO);
	offset -= (u64)pool->pgoff << PAGE_SHIFT;
	*index = offset >> PAGE_SHIFT >> pool->unit_shift;
	if (offset & (vmem_unit_bytes(pool) - 1)) {
		vmem_range_put(pool);
		return ERR_PTR(-EINVAL);
	}
	if (count > (pool->pages >> pool->unit_shift) - *index) {
		vmem_range_put(pool);
		return ERR_PTR(-ERANGE);
	}
	return pool;
}

int vmem_populate(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_populate *arg = argument;
	struct vmem_range *pool;
	unsigned long index;
	int err = 0;

	arg->done = 0;
	arg->scattered = 0;
	if (arg->pad || arg->flags & ~VMEM_POPULATE_STRICT || arg->node < -1)
		return -EINVAL;
	if (arg->node >= 0 && (arg->node >= MAX_NUMNODES || !node_state(arg->node, N_MEMORY)))
		return -ENODEV;
	if (arg->node < 0 && arg->flags & VMEM_POPULATE_STRICT)
		return -EINVAL;
	pool = vmem_slots(ctx, arg->offset, arg->count, &index);
	if (IS_ERR(pool))
		return PTR_ERR(pool);
	while (arg->done < arg->count) {
		bool scattered;

		if (fatal_signal_pending(current)) {
			err = -EINTR;
			break;
		}
		err = vmem_populate_slot(ctx, pool, index + arg->done, arg, &scattered);
		if (err)
			break;
		arg->done++;
		arg->scattered += scattered;
		if (scattered)
			vmem_count(vmem_c_scattered_frames);
		cond_resched();
	}
	vmem_range_put(pool);
	return err;
}

static int vmem_release_slot(struct vmem_ctx *ctx, struct vmem_range *pool, unsigned long index,
			     unsigned int *patience_us)
{
	u64 bytes = vmem_unit_bytes(pool);
	struct vmem_frame *frame;
	int err = 0;

	spin_lock(&ctx->lock);
	frame = xa_load(&pool->units, index);
	if (!frame)
		err = -ENOENT;
	else if (frame->state == VMEM_INSTALLED)
		err = -EBUSY;
	else if (frame->state == VMEM_MOVING)
		err = -EINPROGRESS;
	else
		frame->state = VMEM_MOVING;
	spin_unlock(&ctx->lock);
	if (err)
		return err;

	vmem_frame_barrier(frame);
	unmap_mapping_range(ctx->inode->i_mapping, vmem_unit_offset(pool, index), bytes, 1);
	if (vmem_frame_pinned(frame, 0, NULL, patience_us)) {
		vmem_count(vmem_c_refused_pinned);
		err = -EBUSY;
	}
	spin_lock(&ctx->lock);
	if (err) {
		frame->state = VMEM_FREE;
	} else {
		xa_erase(&pool->units, index);
		ctx->frame_bytes -= bytes;
		ctx->asked_bytes -= min(ctx->asked_bytes, bytes);
	}
	spin_unlock(&ctx->lock);
	if (!err)
		vmem_frame_free(frame);
	return err;
}

int vmem_release(struct vmem_ctx *ctx, void *argument)
{
	unsigned int patience_us = VMEM_PATIENCE_US;
	struct vmem_release *arg = argument;
	struct vmem_range *pool;
	unsigned long index;
	int err = 0;

	arg->done = 0;
	pool = vmem_slots(ctx, arg->offset, arg->count, &index);
	if (IS_ERR(pool))
		return PTR_ERR(pool);
	while (arg->done < arg->count && !err) {
		err = fatal_signal_pending(current) ? -EINTR :
		      vmem_release_slot(ctx, pool, index + arg->done, &patience_us);
		arg->done += !err;
		cond_resched();
	}
	vmem_range_put(pool);
	return err;
}

/* The page that stands at @page_index of the pool now, or NULL. ctx->lock. */
static struct page *vmem_pool_page(struct vmem_range *pool, unsigned long page_index, bool *moving)
{
	struct vmem_frame *frame = xa_load(&pool->units, page_index >> pool->unit_shift);

	*moving = frame && frame->state == VMEM_MOVING;
	if (!frame || *moving)
		return NULL;
	return vmem_frame_page(frame, page_index & (vmem_unit_pages(pool) - 1));
}

/* A touch through the pool's own mapping: the page, or SIGBUS for an empty slot. */
static vm_fault_t vmem_pool_fault(struct vm_fault *vmf)
{
	struct vmem_range *pool = vmf->vma->vm_private_data;
	unsigned long page_index = vmf->pgoff - pool->pgoff;
	struct vmem_ctx *ctx = pool->ctx;
	struct page *page;
	bool moving, same;

	if (page_index >= pool->pages)
		return VM_FAULT_SIGBUS;
	spin_lock(&ctx->lock);
	page = vmem_pool_page(pool, page_index, &moving);
	if (page)
		get_page(page);
	spin_unlock(&ctx->lock);
	if (!page) {
		/* RELEASE works on it: let it, also where it shares the CPU with us. */
		if (moving)
			schedule_timeout_uninterruptible(1);
		return moving ? VM_FAULT_NOPAGE : VM_FAULT_SIGBUS;
	}
	lock_page(page);
	spin_lock(&ctx->lock);
	same = vmem_pool_page(pool, page_index, &moving) == page;
	spin_unlock(&ctx->lock);
	if (same) {
		vmf->page = page;
		return VM_FAULT_LOCKED;
	}
	unlock_page(page);
	put_page(page);
	return VM_FAULT_NOPAGE;		/* it moved: the access comes again */
}

const struct vm_operations_struct vmem_pool_vm_ops = {
	.open = vmem_vma_open,
	.close = vmem_vma_close,
	.fault = vmem_pool_fault,
};
