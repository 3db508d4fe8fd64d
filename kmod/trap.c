// SPDX-License-Identifier: GPL-2.0-only
/*
 * trap.c - faults of regions: serve, or report and wait
 *
 * Three kinds of callers, three ways to wait; none without an end:
 *
 *  - may retry (CPU touches, most pins): let go of mmap_lock, sleep until the block
 *    is answered, the deadline, a signal or the context's death, and say RETRY.
 *  - may retry, but not sleep (FOLL_NOWAIT): report and say RETRY.
 *  - may not retry (a GPU through HMM, pins in old kernels): the caller holds
 *    mmap_lock and everybody who wants it for writing queues behind. Sleep at most
 *    VMEM_HELD_WAIT_MS, then unmap the (absent) page: that runs the mmu notifiers,
 *    so that HMM's caller sees its range changed, lets go and tries again.
 *
 * The deadline belongs to the report, not to the sleep: however often a caller comes
 * back, fault_timeout_ms after the report it gets SIGBUS.
 */

#include <linux/file.h>
#include <linux/hash.h>
#include <linux/pagemap.h>
#include <linux/pid.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "vmem.h"

/* The block's record, made at first use; NULL: no memory. May sleep. */
struct vmem_block *vmem_block_get(struct vmem_range *region, unsigned long index)
{
	struct vmem_block *block = xa_load(&region->units, index);
	int err;

	if (block)
		return block;
	block = kzalloc(sizeof(*block), GFP_KERNEL_ACCOUNT);
	if (!block)
		return NULL;
	block->region = region;
	block->index = index;
	INIT_LIST_HEAD(&block->event);
	err = xa_insert(&region->units, index, block, GFP_KERNEL_ACCOUNT);
	if (!err)
		return block;
	kfree(block);
	return err == -EBUSY ? xa_load(&region->units, index) : NULL;
}

wait_queue_head_t *vmem_block_queue(struct vmem_block *block)
{
	return &block->region->ctx->fault_wq[hash_ptr(block, ilog2(VMEM_QUEUES))];
}

/* Sends every parked thread to look again. */
void vmem_block_kick(struct vmem_block *block)
{
	lockdep_assert_held(&block->region->ctx->lock);
	WRITE_ONCE(block->answers, block->answers + 1);
	block->held = 0;
	wake_up_all(vmem_block_queue(block));
}

/* The same, and the report is done with: who waits again reports again. */
void vmem_block_answer(struct vmem_block *block)
{
	block->posted = false;
	list_del_init(&block->event);
	vmem_block_kick(block);
}

/*
 * Sleeps until the block is answered, its region or context is dead, a signal that
 * @state minds, or @timeout (jiffies) is over. Region and context stay alive by the
 * caller's hold on file and region.
 */
static void vmem_sleep(struct vmem_block *block, u32 answers, unsigned int state, long timeout)
{
	wait_queue_head_t *queue = vmem_block_queue(block);
	struct vmem_range *region = block->region;
	DEFINE_WAIT(wait);

	vmem_count(vmem_c_waits);
	for (;;) {
		prepare_to_wait(queue, &wait, state);
		if (READ_ONCE(block->answers) != answers || READ_ONCE(region->dead) ||
		    READ_ONCE(region->ctx->dead))
			break;
		if (timeout <= 0 || signal_pending_state(state, current))
			break;
		timeout = schedule_timeout(timeout);
	}
	finish_wait(queue, &wait);
}

/* Takes a parked thread's page reference off the books, and hands @ret through. */
static vm_fault_t vmem_wait_over(struct vmem_block *block, u32 answers, bool holds_page, vm_fault_t ret)
{
	struct vmem_ctx *ctx = block->region->ctx;

	if (!holds_page)
		return ret;
	spin_lock(&ctx->lock);
	if (block->answers == answers)	/* else vmem_block_kick() did it for all */
		block->held--;
	spin_unlock(&ctx->lock);
	return ret;
}

/*
 * Reports the block if that was not done, waits by the rules above, and says what
 * the fault handler returns. Comes with ctx->lock, goes without. @holds_page: core
 * code holds a reference to the block's page for this caller (page_mkwrite).
 */
static vm_fault_t vmem_wait(struct vm_fault *vmf, struct vmem_block *block, bool holds_page)
	__releases(&block->region->ctx->lock)
{
	struct vm_area_struct *vma = vmf->vma;
	struct vmem_range *region = block->region;
	struct vmem_ctx *ctx = region->ctx;
	unsigned int flags = vmf->flags, state = TASK_KILLABLE;
	vm_fault_t more = holds_page ? VM_FAULT_NOPAGE : 0;
	bool leaving = block->state == VMEM_LEAVING;
	struct file *file;
	u32 answers;
	long timeout;

	if (block->posted && !leaving && time_after_eq(jiffies, block->deadline)) {
		if (time_before(jiffies, block->deadline + msecs_to_jiffies(VMEM_EXPIRED_MS))) {
			spin_unlock(&ctx->lock);
			vmem_count(vmem_c_timeouts);
			return VM_FAULT_SIGBUS;
		}
		block->posted = false;
		list_del_init(&block->event);
	}
	/* Whoever takes the block out answers it before long; then it is reported. */
	if (!block->posted && !leaving) {
		u32 kind = flags & FAULT_FLAG_WRITE ? VMEM_FAULT_WRITE : 0;

		if (block->state == VMEM_PRESENT)
			kind |= VMEM_FAULT_PROTECTED;
		if (flags & FAULT_FLAG_REMOTE || current->mm != vma->vm_mm)
			kind |= VMEM_FAULT_REMOTE;
		block->deadline = jiffies + msecs_to_jiffies(READ_ONCE(vmem_knobs.fault_timeout_ms));
		vmem_post(block, vmf->address & PAGE_MASK,
			  task_pid_nr_ns(current, ns_of_pid(ctx->owner)), kind);
	}
	timeout = leaving ? HZ : (long)(block->deadline - jiffies) + 1;
	answers = block->answers;

	if (flags & FAULT_FLAG_RETRY_NOWAIT) {
		spin_unlock(&ctx->lock);
		return VM_FAULT_RETRY | more;
	}
	/* REMOVE must not take the reference of a thread that waits for it for a pin. */
	if (holds_page)
		block->held++;
	spin_unlock(&ctx->lock);

	if (!(flags & FAULT_FLAG_ALLOW_RETRY)) {
		if (fatal_signal_pending(current))
			return vmem_wait_over(block, answers, holds_page, VM_FAULT_SIGBUS);
		vmem_sleep(block, answers, TASK_KILLABLE,
			   min_t(long, timeout, msecs_to_jiffies(VMEM_HELD_WAIT_MS)));
		if (READ_ONCE(block->answers) == answers)
			unmap_mapping_range(vma->vm_file->f_mapping, (loff_t)vmf->pgoff << PAGE_SHIFT,
					    PAGE_SIZE, 1);
		return vmem_wait_over(block, answers, holds_page, VM_FAULT_NOPAGE);
	}
	/* A signal may interrupt what can be started anew: a plain access of user code. */
	if (flags & FAULT_FLAG_USER && flags & FAULT_FLAG_INTERRUPTIBLE)
		state = TASK_INTERRUPTIBLE;
	/* Without the lock the mapping may go, and take region and file along. */
	file = get_file(vma->vm_file);
	kref_get(&region->ref);
	vmem_release_fault_lock(vmf);
	vmem_sleep(block, answers, state, timeout);
	more = vmem_wait_over(block, answers, holds_page, VM_FAULT_RETRY | more);
	vmem_range_put(region);
	fput(file);
	return more;
}

static void vmem_count_fault(struct vm_fault *vmf)
{
	if (vmf->flags & FAULT_FLAG_REMOTE || current->mm != vmf->vma->vm_mm)
		vmem_count(vmem_c_faults_remote);
	else if (vmf->flags & FAULT_FLAG_WRITE)
		vmem_count(vmem_c_faults_write);
	else
		vmem_count(vmem_c_faults_read);
}

static vm_fault_t vmem_sigbus(struct vmem_ctx *ctx)
	__releases(&ctx->lock)
{
	spin_unlock(&ctx->lock);
	vmem_count(vmem_c_sigbus);
	return VM_FAULT_SIGBUS;
}

/* Whether @vmf may go on with the block as it is. ctx->lock. */
static bool vmem_served(struct vm_fault *vmf, struct vmem_block *block)
{
	return block->state == VMEM_PRESENT && !(vmf->flags & FAULT_FLAG_WRITE && block->protect);
}

static vm_fault_t vmem_region_fault(struct vm_fault *vmf)
{
	struct vmem_range *region = vmf->vma->vm_private_data;
	unsigned long page_index = vmf->pgoff - region->pgoff;
	unsigned long in_block = page_index & (vmem_unit_pages(region) - 1);
	struct vmem_ctx *ctx = region->ctx;
	struct vmem_frame *frame;
	struct vmem_block *block;
	struct page *page;
	bool same;

	if (page_index >= region->pages || READ_ONCE(region->dead))
		return VM_FAULT_SIGBUS;
	block = vmem_block_get(region, page_index >> region->unit_shift);
	if (!block)
		return VM_FAULT_OOM;
	vmem_count_fault(vmf);

	spin_lock(&ctx->lock);
	if (region->dead || block->state == VMEM_FAILED || (ctx->dead && !vmem_served(vmf, block)))
		return vmem_sigbus(ctx);
	if (!vmem_served(vmf, block))
		return vmem_wait(vmf, block, false);
	frame = block->frame;
	page = vmem_frame_page(frame, in_block);
	get_page(page);
	spin_unlock(&ctx->lock);

	lock_page(page);
	spin_lock(&ctx->lock);
	same = vmem_served(vmf, block) && block->frame == frame && !region->dead &&
	       vmem_frame_page(frame, in_block) == page;
	if (same) {
		block->touched = true;
		/* Entries of a longterm region are writable at once: nothing more is heard. */
		if (region->longterm)
			block->dirty = true;
	}
	spin_unlock(&ctx->lock);
	if (same) {
		vmf->page = page;
		return VM_FAULT_LOCKED;
	}
	unlock_page(page);
	put_page(page);
	return VM_FAULT_NOPAGE;		/* it moved meanwhile: the access comes again */
}

/*
 * The first store through an entry. The mark is set under the page's lock, before
 * the entry becomes writable: see vmem_frame_barrier().
 */
static vm_fault_t vmem_region_mkwrite(struct vm_fault *vmf)
{
	struct vmem_range *region = vmf->vma->vm_private_data;
	unsigned long page_index = vmf->pgoff - region->pgoff;
	struct vmem_ctx *ctx = region->ctx;
	struct page *page = vmf->page;
	struct vmem_block *block;

	block = xa_load(&region->units, page_index >> region->unit_shift);
	if (!block)
		return VM_FAULT_SIGBUS;
	lock_page(page);
	spin_lock(&ctx->lock);
	if (block->state == VMEM_LEAVING) {
		unlock_page(page);
		return vmem_wait(vmf, block, true);
	}
	if (block->state != VMEM_PRESENT || region->dead ||
	    vmem_frame_page(block->frame, page_index & (vmem_unit_pages(region) - 1)) != page) {
		/* The entry is about to be unmapped: the access comes again as a fault. */
		spin_unlock(&ctx->lock);
		unlock_page(page);
		return VM_FAULT_NOPAGE;
	}
	if (block->protect) {
		unlock_page(page);
		if (ctx->dead)
			return vmem_sigbus(ctx);
		vmem_count(vmem_c_faults_protected);
		return vmem_wait(vmf, block, true);
	}
	block->dirty = true;
	spin_unlock(&ctx->lock);
	return VM_FAULT_LOCKED;
}

/* Entries start read-only, each first store is seen: exact dirty marks, protection. */
const struct vm_operations_struct vmem_region_vm_ops = {
	.open = vmem_vma_open,
	.close = vmem_vma_close,
	.fault = vmem_region_fault,
	.page_mkwrite = vmem_region_mkwrite,
};

/* The kernel refuses long-term pins where ->page_mkwrite watches stores. */
const struct vm_operations_struct vmem_longterm_vm_ops = {
	.open = vmem_vma_open,
	.close = vmem_vma_close,
	.fault = vmem_region_fault,
};
