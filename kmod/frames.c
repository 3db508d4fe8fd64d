// SPDX-License-Identifier: GPL-2.0-only
/*
 * frames.c - memory that stays: the frames of pools, and pins of the caller's buffers
 * A frame has the size of a block, in equal, physically contiguous pieces: one if memory allows. It
 * is zeroed before any process sees it, and belongs to its context alone until it is freed.
 */

#include <linux/delay.h>
#include <linux/cred.h>

#include "vmem.h"

#define VMEM_PIN_MAX	BIT(30)
#define VMEM_PIN_STEP	512	/* pages between looks at signals */

/*
 * A fault sets its entry under the lock of the piece, after a look at the state under that lock.
 * So after a change of state and a pass through every lock all entries of the old state are set,
 * and unmapping removes them. May sleep; the caller keeps the frame alive.
 */
void vmem_frame_barrier(struct vmem_frame *frame)
{
	unsigned int i;

	for (i = 0; i < frame->pieces; i++) {
		lock_page(frame->piece[i]);
		unlock_page(frame->piece[i]);
	}
}

static unsigned int vmem_folio_pins(struct folio *folio)
{
	return folio_test_large(folio) ? atomic_read(&folio->_pincount) :
					 folio_ref_count(folio) / GUP_PIN_COUNTING_BIAS;
}

/* Returns the pins (FOLL_PIN) on the frame now. Never sleeps. */
unsigned int vmem_frame_pins(struct vmem_frame *frame)
{
	unsigned int i, pins = 0;

	for (i = 0; i < frame->pieces; i++)
		pins += vmem_folio_pins(page_folio(frame->piece[i]));
	return pins;
}

/* True if any page of the piece has an error: not every kernel marks the folio for each page. */
static bool vmem_piece_broken(struct page *page, unsigned int order)
{
	unsigned long i;

	for (i = 0; i < 1UL << order; i++)
		if (PageHWPoison(page + i))
			return true;
	return false;
}

bool vmem_frame_broken(const struct vmem_frame *frame)
{
	unsigned int i;

	for (i = 0; i < frame->pieces; i++)
		if (vmem_piece_broken(frame->piece[i], frame->order))
			return true;
	return false;
}

/*
 * True if the frame is held beyond the module, page tables and pins. Where entries can come and go
 * (the pool's own mapping), they are counted under the piece's lock, where none is added, and after
 * the references. Pins are read before and after, and the lower number counts: pins that change in
 * between make the frame look held, not free. A broken piece is never used again: the kernel's
 * error handling holds it for good. Without @wait it never sleeps; a locked piece counts as held.
 */
bool vmem_frame_held(struct vmem_frame *frame, bool wait)
{
	bool held = false;
	unsigned int i;

	for (i = 0; i < frame->pieces && !held; i++) {
		struct folio *folio = page_folio(frame->piece[i]);
		unsigned int pins;
		long refs;

		if (!wait && !folio_trylock(folio))
			return true;
		if (wait)
			folio_lock(folio);
		pins = vmem_folio_pins(folio);
		smp_rmb();	/* pins before references */
		refs = folio_ref_count(folio) - 1;
		smp_rmb();	/* references before entries */
		refs -= vmem_folio_mapcount(folio);
		if (folio_test_large(folio))
			refs -= min(pins, vmem_folio_pins(folio));
		else
			refs %= GUP_PIN_COUNTING_BIAS;
		folio_unlock(folio);
		held = refs > 0 && !vmem_piece_broken(frame->piece[i], frame->order);
	}
	return held;
}

/*
 * True if the frame is in use: at once if it has more than @base_pins pins; for a plain reference
 * after some patience, as a fault may be about to drop it. Uses up *@patience_us.
 */
bool vmem_frame_pinned(struct vmem_frame *frame, unsigned int base_pins, unsigned int *patience_us)
{
	while (vmem_frame_held(frame, true)) {
		if (vmem_frame_pins(frame) > base_pins || !*patience_us)
			return true;
		usleep_range(VMEM_PATIENCE_US / 200, VMEM_PATIENCE_US / 100);
		*patience_us -= VMEM_PATIENCE_US / 200;
	}
	return vmem_frame_pins(frame) > base_pins;
}

/* Charges frame bytes before the allocation, or returns them if negative. */
static int vmem_charge(struct vmem_ctx *ctx, s64 bytes)
{
	u64 limit = vmem_get(vmem_frame_limit_bytes), own = vmem_get(vmem_context_limit_bytes);
	u64 all = atomic64_add_return(bytes, &vmem_files[vmem_frame_bytes].value);
	u64 users = atomic64_add_return(bytes, &ctx->user->frame_bytes);
	u64 user = ctx->unlimited ? 0 : vmem_get(vmem_user_limit_bytes);
	bool over;

	vmem_lock(ctx);
	over = bytes > 0 && ((limit && all > limit) || (user && users > user) ||
			     (own && ctx->frame_bytes + bytes > own));
	if (!over)
		ctx->frame_bytes += bytes;
	vmem_unlock(ctx);
	if (!over)
		return 0;
	vmem_add(vmem_frame_bytes, -bytes);
	atomic64_sub(bytes, &ctx->user->frame_bytes);
	vmem_add(vmem_refused_limit, 1);
	return -EDQUOT;
}

/*
 * Frames without an owner that are still referenced: by a pipe, a socket's queue, a transfer. They
 * stay charged until the last reference goes, which nothing reports. A work looks at them now and
 * then, for at most a sixteenth of a CPU's time, however many there are.
 */
#define VMEM_LEFT_SOON	(HZ / 20UL)
#define VMEM_LEFT_LATE	(10UL * HZ)

static void vmem_left_work(struct work_struct *unless_end);
struct kmem_cache *vmem_frame_cache;
static LIST_HEAD(vmem_left);
static DEFINE_SPINLOCK(vmem_left_lock);
static unsigned long vmem_left_pause = VMEM_LEFT_SOON;	/* vmem_left_lock */
static DECLARE_DELAYED_WORK(vmem_left_later, vmem_left_work);

/* Frees the pieces without other references, or all if @anyway. True: no piece is left. */
static bool vmem_pieces_free(struct vmem_frame *frame, bool anyway)
{
	s64 bytes = (s64)PAGE_SIZE << frame->order;
	unsigned int i, left = 0;

	for (i = 0; i < frame->pieces; i++) {
		struct page *page = frame->piece[i];
		bool broken = vmem_piece_broken(page, frame->order);

		if (!broken && !anyway && page_ref_count(page) > 1) {
			frame->piece[left++] = page;
			continue;
		}
		atomic64_sub(bytes, &vmem_node_files[page_to_nid(page)].value);
		if (broken) {
			vmem_add(vmem_broken_bytes, bytes);
			continue;
		}
		ClearPageDirty(page);
		put_page(page);
	}
	frame->pieces = left;
	return !left;
}

static void vmem_left_work(struct work_struct *unless_end)
{
	bool some = false, anyway = !unless_end;
	unsigned long start = jiffies;
	struct vmem_frame *frame, *next;
	LIST_HEAD(list);

	spin_lock(&vmem_left_lock);
	list_splice_init(&vmem_left, &list);
	spin_unlock(&vmem_left_lock);
	list_for_each_entry_safe(frame, next, &list, link) {
		s64 bytes = (s64)frame->pieces * (PAGE_SIZE << frame->order);
		bool gone = vmem_pieces_free(frame, anyway);

		bytes -= (s64)frame->pieces * (PAGE_SIZE << frame->order);
		some |= bytes;
		vmem_add(vmem_left_bytes, -bytes);
		vmem_add(vmem_frame_bytes, -bytes);
		atomic64_sub(bytes, &frame->user->frame_bytes);
		if (gone) {
			list_del(&frame->link);
			vmem_user_put(frame->user);
			kvfree(frame->piece);
			kmem_cache_free(vmem_frame_cache, frame);
		}
		cond_resched();
	}
	spin_lock(&vmem_left_lock);
	vmem_left_pause = some ? VMEM_LEFT_SOON : min(2 * vmem_left_pause, VMEM_LEFT_LATE);
	vmem_left_pause = max(vmem_left_pause, 16 * (jiffies - start));
	list_splice(&list, &vmem_left);
	if (!list_empty(&vmem_left) && !anyway)
		mod_delayed_work(system_wq, &vmem_left_later, vmem_left_pause);
	spin_unlock(&vmem_left_lock);
}

/* The module goes: other references keep their pages alive, which are counted no longer. */
void vmem_frames_end(void)
{
	cancel_delayed_work_sync(&vmem_left_later);
	vmem_left_work(NULL);
	kmem_cache_destroy(vmem_frame_cache);
}

/*
 * Frees the memory, or leaves it to vmem_left_work() while it is referenced. A piece with a memory
 * error is kept for good: core code would hand on its neighbours, or even the broken page.
 */
void vmem_frame_free(struct vmem_range *pool, struct vmem_frame *frame)
{
	s64 left;

	list_lru_del_obj(&vmem_frames, &frame->link);	/* the shrinker no longer sees it */
	if (!vmem_pieces_free(frame, false)) {
		left = (s64)frame->pieces * (PAGE_SIZE << frame->order);
		frame->user = pool->ctx->user;
		refcount_inc(&frame->user->ref);
		vmem_add(vmem_left_bytes, left);
		vmem_add(vmem_frame_bytes, left);
		atomic64_add(left, &frame->user->frame_bytes);
		spin_lock(&vmem_left_lock);
		list_add_tail(&frame->link, &vmem_left);
		schedule_delayed_work(&vmem_left_later, VMEM_LEFT_SOON);
		spin_unlock(&vmem_left_lock);
	} else {
		kvfree(frame->piece);
		kmem_cache_free(vmem_frame_cache, frame);
	}
	vmem_charge(pool->ctx, -(s64)vmem_unit_bytes(pool));
	wake_up(&vmem_given);
}

/* Makes a frame for @pool in pieces of @order, zeroed and charged, or returns an error. */
static struct vmem_frame *vmem_frame_alloc(struct vmem_range *pool, const struct vmem_populate *arg,
					   unsigned int order)
{
	unsigned int pieces = 1U << (pool->unit_shift - order);
	gfp_t gfp = GFP_USER | __GFP_ACCOUNT | __GFP_ZERO | __GFP_NOWARN;	/* in the cpuset */
	struct vmem_frame *frame;

	gfp |= order ? __GFP_COMP | __GFP_NORETRY : __GFP_RETRY_MAYFAIL;
	if (arg->flags & VMEM_POPULATE_STRICT)
		gfp |= __GFP_THISNODE;
	if (vmem_charge(pool->ctx, vmem_unit_bytes(pool)))
		return ERR_PTR(-EDQUOT);
	frame = kmem_cache_alloc_lru(vmem_frame_cache, &vmem_frames, VMEM_CALL_GFP | __GFP_ZERO);
	if (!frame) {
		vmem_charge(pool->ctx, -(s64)vmem_unit_bytes(pool));
		return ERR_PTR(-ENOMEM);
	}
	INIT_LIST_HEAD(&frame->link);
	frame->ctx = pool->ctx;
	frame->order = order;
	frame->piece = kvcalloc(pieces, sizeof(*frame->piece), VMEM_CALL_GFP);
	while (frame->pieces < pieces) {
		struct page *page = frame->piece ? alloc_pages_node(arg->node, gfp, order) : NULL;

		if (!page) {
			vmem_frame_free(pool, frame);
			return ERR_PTR(-ENOMEM);
		}
		/* Core code compares the folio's index with the file's size. */
		page_folio(page)->index = 0;
		frame->piece[frame->pieces++] = page;
		atomic64_add((s64)PAGE_SIZE << order, &vmem_node_files[page_to_nid(page)].value);
	}
	list_lru_add_obj(&vmem_frames, &frame->link);
	return frame;
}

static int vmem_populate_slot(struct vmem_range *pool, unsigned long index, void *argument)
{
	unsigned int want = min_t(unsigned int, vmem_get(vmem_frame_order), pool->unit_shift);
	struct vmem_populate *arg = argument;
	unsigned int order = want;
	struct vmem_frame *frame;
	int err;

	while ((frame = vmem_frame_alloc(pool, arg, order)) == ERR_PTR(-ENOMEM) && order)
		order = order > 4 ? 4 : 0;	/* 64 KiB still suits an SSD */
	if (IS_ERR(frame))
		return PTR_ERR(frame);
	frame->offset = vmem_unit_offset(pool, index);
	frame->state = VMEM_MOVING;	/* until its pool is known to live */
	vmem_point();
	err = xa_insert(&pool->units, index, frame, VMEM_CALL_GFP);
	if (!err) {
		vmem_lock(pool->ctx);
		if (pool->dead) {
			xa_erase(&pool->units, index);
			err = -ENXIO;
		} else {
			frame->state = VMEM_FREE;
		}
		vmem_unlock(pool->ctx);
	}
	if (err) {
		vmem_frame_free(pool, frame);
		return err == -EBUSY ? -EEXIST : err;
	}
	arg->scattered += order < want;
	vmem_add(vmem_scattered_frames, order < want);
	return 0;
}

static int vmem_release_slot(struct vmem_range *pool, unsigned long index, void *patience_us)
{
	u64 bytes = vmem_unit_bytes(pool);
	struct vmem_ctx *ctx = pool->ctx;
	struct vmem_frame *frame;
	int err = 0;

	vmem_lock(ctx);
	frame = xa_load(&pool->units, index);
	if (!frame)
		err = -ENOENT;
	else if (frame->state != VMEM_FREE)
		err = frame->state == VMEM_INSTALLED ? -EBUSY : -EINPROGRESS;
	else
		frame->state = VMEM_MOVING;
	vmem_unlock(ctx);
	if (err)
		return err;
	vmem_point();
	vmem_frame_barrier(frame);
	unmap_mapping_range(ctx->inode->i_mapping, frame->offset, bytes, 1);
	if (vmem_frame_pinned(frame, 0, patience_us))
		err = -EBUSY;
	vmem_lock(ctx);
	frame->state = VMEM_FREE;
	if (!err) {
		xa_erase(&pool->units, index);
		ctx->asked_bytes -= min(ctx->asked_bytes, bytes);
		ctx->answered_at = jiffies;
	}
	vmem_unlock(ctx);
	if (err)
		vmem_add(vmem_refused_pinned, 1);
	else
		vmem_frame_free(pool, frame);
	return err;
}

/* Calls @work for @count slots from @offset on, one by one until the first error. */
static int vmem_each_slot(struct vmem_ctx *ctx, u64 offset, u32 count, u32 *done, void *arg,
			  int (*work)(struct vmem_range *pool, unsigned long index, void *arg))
{
	struct vmem_range *pool;
	unsigned long index;
	int err = 0;

	pool = vmem_units_find(ctx, offset, VMEM_KIND_POOL, count, &index);
	if (IS_ERR(pool))
		return PTR_ERR(pool);
	while (*done < count && !err) {
		err = fatal_signal_pending(current) ? -EINTR : work(pool, index + *done, arg);
		*done += !err;
		cond_resched();
	}
	vmem_range_put(pool);
	return err;
}

int vmem_populate(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_populate *arg = argument;

	arg->done = 0;
	arg->scattered = 0;
	if (arg->pad || arg->flags & ~VMEM_POPULATE_STRICT || arg->node < -1 ||
	    (arg->node == -1 && arg->flags))
		return -EINVAL;
	if (arg->node >= 0 && (arg->node >= MAX_NUMNODES || !node_state(arg->node, N_MEMORY)))
		return -ENODEV;
	return vmem_each_slot(ctx, arg->offset, arg->count, &arg->done, arg, vmem_populate_slot);
}

int vmem_release(struct vmem_ctx *ctx, void *argument)
{
	unsigned int patience_us = VMEM_PATIENCE_US;
	struct vmem_release *arg = argument;

	arg->done = 0;
	return vmem_each_slot(ctx, arg->offset, arg->count, &arg->done, &patience_us,
			      vmem_release_slot);
}

/* Long-term pins of the caller's own memory. */
struct vmem_pinned {
	const struct cred *cred;	/* keeps its user: not every 6.1 exports free_uid() */
	struct mm_struct *mm;	/* its pinned_vm counts the pages */
	unsigned long charged;	/* pages, or 0: to the caller's user and the context's */
	unsigned long pages;	/* pinned */
	unsigned long all;	/* pages, in the counters */
	bool write;
	struct page *page[];
};

static void vmem_pin_free(struct vmem_ctx *ctx, struct vmem_pinned *pinned)
{
	unpin_user_pages_dirty_lock(pinned->page, pinned->pages, pinned->write);
	atomic_long_sub(pinned->charged, &pinned->cred->user->locked_vm);
	atomic_long_sub(pinned->charged, &ctx->user->pinned);
	atomic64_sub(pinned->all, &pinned->mm->pinned_vm);
	mmdrop(pinned->mm);
	atomic64_sub(pinned->all << PAGE_SHIFT, &ctx->pinned_bytes);
	vmem_add(vmem_pinned_bytes, -(s64)(pinned->all << PAGE_SHIFT));
	put_cred(pinned->cred);
	kvfree(pinned);
}

int vmem_pin(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_pin *arg = argument;
	unsigned int gup = FOLL_LONGTERM | (arg->flags & VMEM_PIN_WRITE ? FOLL_WRITE : 0);
	unsigned long i, pages = arg->size >> PAGE_SHIFT;
	struct vmem_pinned *pinned;
	int err = -ENOMEM;

	if (arg->pad || arg->flags & ~VMEM_PIN_WRITE || !arg->size || arg->size > VMEM_PIN_MAX ||
	    (arg->address | arg->size) & ~PAGE_MASK)
		return -EINVAL;
	if (arg->address + arg->size < arg->address)
		return -ERANGE;
	pinned = kvzalloc(struct_size(pinned, page, pages), VMEM_CALL_GFP);
	if (!pinned)
		return -ENOMEM;
	pinned->write = arg->flags & VMEM_PIN_WRITE;
	pinned->cred = get_current_cred();
	pinned->mm = current->mm;
	mmgrab(pinned->mm);
	pinned->all = pages;
	atomic64_add(pages, &pinned->mm->pinned_vm);
	atomic64_add(arg->size, &ctx->pinned_bytes);
	vmem_add(vmem_pinned_bytes, arg->size);
	if (!capable(CAP_IPC_LOCK)) {
		pinned->charged = pages;
		i = atomic_long_add_return(pages, &pinned->cred->user->locked_vm);
		i = max_t(unsigned long, i, atomic_long_add_return(pages, &ctx->user->pinned));
		if (i > rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT)
			goto err_free;
	}
	while (pinned->pages < pages) {
		int n = min_t(unsigned long, pages - pinned->pages, VMEM_PIN_STEP);

		n = pin_user_pages_fast(arg->address + (pinned->pages << PAGE_SHIFT), n, gup,
					pinned->page + pinned->pages);
		err = n < 0 ? n : n == 0 ? -EFAULT : fatal_signal_pending(current) ? -EINTR : 0;
		pinned->pages += max(n, 0);
		if (err)
			goto err_free;
		cond_resched();
	}
	arg->runs = 1;
	for (i = 1; i < pages; i++)
		arg->runs += page_to_pfn(pinned->page[i]) != page_to_pfn(pinned->page[i - 1]) + 1;
	vmem_point();
	err = xa_alloc(&ctx->pins, &arg->id, pinned, xa_limit_31b, VMEM_CALL_GFP);
	if (!err)
		return 0;
err_free:
	vmem_pin_free(ctx, pinned);
	return err;
}

int vmem_unpin(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_unpin *arg = argument;
	struct vmem_pinned *pinned;

	if (arg->pad)
		return -EINVAL;
	pinned = xa_erase(&ctx->pins, arg->id);
	if (!pinned)
		return -ENOENT;
	vmem_point();
	vmem_pin_free(ctx, pinned);
	return 0;
}

void vmem_unpin_all(struct vmem_ctx *ctx)
{
	struct vmem_pinned *pinned;
	unsigned long id;

	xa_for_each(&ctx->pins, id, pinned)
		vmem_pin_free(ctx, pinned);
	xa_destroy(&ctx->pins);
}
