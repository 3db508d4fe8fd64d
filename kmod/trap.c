// SPDX-License-Identifier: GPL-2.0-only
/* trap.c - faults: serve, or report and wait: docs/kernel-module.md, "Why each wait ends" */

#include <linux/file.h>
#include <linux/hash.h>
#include <linux/mmu_notifier.h>

#include "vmem.h"

/* Returns the block's record if there is one, counted as in use. Takes ctx->lock. */
static struct vmem_block *vmem_block_find(struct vmem_range *region, unsigned long index)
{
	struct vmem_block *block;

	vmem_lock(region->ctx);
	block = xa_load(&region->units, index);
	if (block)
		block->users++;
	vmem_unlock(region->ctx);
	return block;
}

/*
 * The same; with @gfp makes a record if there is none, or returns an error pointer for a limit or
 * no memory. Without @gfp returns NULL. May sleep. The caller holds the region.
 */
struct vmem_block *vmem_block_get(struct vmem_range *region, unsigned long index, gfp_t gfp)
{
	struct vmem_block *old, *block = vmem_block_find(region, index);
	int err = -ENOMEM;

	if (block || !gfp)
		return block;
	if (!vmem_record(region->ctx, 1))
		return ERR_PTR(-EDQUOT);
	block = kzalloc(sizeof(*block), gfp);
	if (!block)
		goto err_record;
	block->region = region;
	block->offset = vmem_unit_offset(region, index);
	block->users = 1;
	INIT_LIST_HEAD(&block->event);
	do {
		vmem_point();
		old = xa_cmpxchg(&region->units, index, NULL, block, gfp);
		if (!old)
			return block;
		err = xa_err(old);
		/* The thread that was first may be done, and its record gone. */
		old = err ? NULL : vmem_block_find(region, index);
	} while (!old && !err);
	kfree(block);
err_record:
	vmem_record(region->ctx, -1);
	return err ? ERR_PTR(err) : old;
}

/* Drops a use; a record that says nothing goes with its last use. Takes ctx->lock. */
void vmem_block_put(struct vmem_block *block)
{
	struct vmem_ctx *ctx = block->region->ctx;
	bool idle;

	vmem_lock(ctx);
	idle = !--block->users && block->state == VMEM_ABSENT && !block->busy &&
	       !(block->flags & VMEM_STATE_WAITED);
	if (idle)
		xa_erase(&block->region->units, ((block->offset >> PAGE_SHIFT) -
			 block->region->pgoff) >> block->region->unit_shift);
	vmem_unlock(ctx);
	if (idle) {
		kfree(block);
		vmem_record(ctx, -1);
	}
}

wait_queue_head_t *vmem_block_queue(struct vmem_block *block)
{
	return &block->region->ctx->fault_wq[hash_ptr(block, ilog2(VMEM_QUEUES))];
}

/* Makes every parked thread look again. */
void vmem_block_kick(struct vmem_block *block)
{
	lockdep_assert_held(&block->region->ctx->lock);
	WRITE_ONCE(block->answers, block->answers + 1);
	wake_up_all(vmem_block_queue(block));
}

/* The same, and ends the report: a thread that waits again reports again. */
void vmem_block_answer(struct vmem_block *block)
{
	block->flags &= ~VMEM_STATE_WAITED;
	list_del_init(&block->event);
	vmem_block_kick(block);
}

static bool vmem_fault_remote(const struct vm_fault *vmf)
{
	return vmf->flags & FAULT_FLAG_REMOTE || current->mm != vmf->vma->vm_mm;
}

/*
 * True if the fault may come from hmm_range_fault(), for a GPU, or from an IOMMU that shares page
 * tables. They fault for the process's own memory or in a kernel thread, with an mmu notifier.
 */
static bool vmem_fault_hmm(const struct vm_fault *vmf)
{
	struct mm_struct *mm = vmf->vma->vm_mm;

	return (current->flags & PF_KTHREAD || current->mm == mm) && mm_has_notifiers(mm) &&
	       (vmf->flags & (FAULT_FLAG_REMOTE | FAULT_FLAG_ALLOW_RETRY)) == FAULT_FLAG_REMOTE;
}

static void vmem_unmap_page(const struct vm_fault *vmf)
{
	unmap_mapping_range(vmf->vma->vm_file->f_mapping, (loff_t)vmf->pgoff << PAGE_SHIFT,
			    PAGE_SIZE, 1);
}

/* A reader in the queue for a process's mmap_lock, behind a waiting writer. */
struct vmem_line {
	struct list_head link;		/* vmem_lines */
	struct work_struct work;
	struct mm_struct *mm;
	unsigned int looks;		/* of faults that held the lock meanwhile */
	unsigned long since;		/* jiffies: the first look */
};

static LIST_HEAD(vmem_lines);
static DEFINE_SPINLOCK(vmem_lines_lock);	/* innermost */
struct workqueue_struct *vmem_line_wq;

static void vmem_line_work(struct work_struct *work)
{
	struct vmem_line *line = container_of(work, struct vmem_line, work);

	mmap_read_lock(line->mm);
	mmap_read_unlock(line->mm);
	spin_lock(&vmem_lines_lock);
	list_del(&line->link);
	spin_unlock(&vmem_lines_lock);
	mmdrop(line->mm);
	kfree(line);
}

/*
 * True if faults have kept @mm's lock from a writer for too long. Looks cannot tell a fault that
 * drops the lock between its tries, as a device's does. But readers queue behind a waiting writer.
 * So a reader of ours queues there: until it has had the lock, the holder has held it all along.
 */
static bool vmem_holds_up(struct mm_struct *mm)
{
	struct vmem_line *line;
	bool late = false;

	spin_lock(&vmem_lines_lock);
	list_for_each_entry(line, &vmem_lines, link)
		if (line->mm == mm)
			break;
	if (!list_entry_is_head(line, &vmem_lines, link)) {
		if (work_pending(&line->work) || !line->looks++)
			line->since = jiffies;	/* not in the queue until now */
		late = line->looks > VMEM_HELD_LOOKS && time_after(jiffies, line->since + HZ);
	} else if (mmap_lock_is_contended(mm)) {
		line = kzalloc(sizeof(*line), GFP_NOWAIT | __GFP_NOWARN);
		if (line) {	/* otherwise the next look tries again */
			mmgrab(mm);
			line->mm = mm;
			INIT_WORK(&line->work, vmem_line_work);
			list_add(&line->link, &vmem_lines);
			queue_work(vmem_line_wq, &line->work);
		}
	}
	spin_unlock(&vmem_lines_lock);
	return late;
}

/*
 * True if a wait of this fault harms no other task. The kernel, for a system call or another's
 * memory, waits if that was granted, unless the task is to freeze and came back once: it cannot.
 */
static bool vmem_may_wait(const struct vm_fault *vmf, const struct vmem_ctx *ctx)
{
	if (current->flags & (PF_EXITING | PF_DUMPCORE) || fatal_signal_pending(current))
		return false;
	if (vmf->flags & FAULT_FLAG_USER && !vmem_fault_remote(vmf))
		return true;
	if (vmf->flags & FAULT_FLAG_TRIED && READ_ONCE(current->jobctl) & JOBCTL_TRAP_FREEZE)
		return false;
	return READ_ONCE(ctx->kernel_faults) || vmem_fault_hmm(vmf);
}

/* Queues an event for the fault and starts its deadline. Needs ctx->lock. */
static void vmem_report(struct vm_fault *vmf, struct vmem_block *block)
{
	struct vmem_ctx *ctx = block->region->ctx;

	block->flags |= VMEM_STATE_WAITED;
	block->deadline = jiffies + msecs_to_jiffies(vmem_get(vmem_fault_timeout_ms));
	block->report = (struct vmem_event){
		.type = VMEM_EVENT_FAULT,
		.flags = (vmf->flags & FAULT_FLAG_WRITE ? VMEM_FAULT_WRITE : 0) |
			 (block->state == VMEM_PRESENT ? VMEM_FAULT_PROTECTED : 0) |
			 (vmem_fault_remote(vmf) ? VMEM_FAULT_REMOTE : 0),
		.offset = block->offset,
		.address = vmf->address & PAGE_MASK,
		.thread = task_pid_nr_ns(current, ns_of_pid(ctx->owner)),
	};
	list_move_tail(&block->event, &ctx->events);
	vmem_add(vmem_events, 1);
	vmem_notify(ctx);
}

/*
 * Returns the page that can serve the fault now, or NULL. Its block gets @marks. Marks made under
 * the page's lock are set before the entry is: vmem_frame_barrier(). Needs ctx->lock.
 */
static struct page *vmem_standing(struct vm_fault *vmf, struct vmem_range *range, u32 marks)
{
	unsigned long page = vmf->pgoff - range->pgoff;
	void *unit = xa_load(&range->units, page >> range->unit_shift);
	struct vmem_frame *frame = unit;
	struct vmem_block *block = unit;

	lockdep_assert_held(&range->ctx->lock);
	if (!unit || range->dead)
		return NULL;
	if (range->kind == VMEM_KIND_REGION) {
		if (block->state != VMEM_PRESENT ||
		    (vmf->flags & FAULT_FLAG_WRITE && block->flags & VMEM_STATE_PROTECTED))
			return NULL;
		block->flags |= marks;
		frame = block->frame;
		/* A pin that was ending at INSTALL must not hide one that this entry leads to. */
		if (marks && frame->base_pins)
			frame->base_pins = min(frame->base_pins, vmem_frame_pins(frame));
	} else if (frame->state == VMEM_MOVING) {
		return NULL;
	}
	page &= (1UL << range->unit_shift) - 1;
	return frame->piece[page >> frame->order] + (page & ((1UL << frame->order) - 1));
}

/*
 * For a fault that cannot be served: SIGBUS, or reports the block if necessary and waits by the
 * rules above, not frozen with mmap_lock held. Drops ctx->lock and the use of the block.
 */
static vm_fault_t vmem_wait(struct vm_fault *vmf, struct vmem_block *block)
	__releases(&block->region->ctx->lock)
{
	bool expired = block->flags & VMEM_STATE_WAITED && time_after_eq(jiffies, block->deadline);
	bool retry = vmf->flags & FAULT_FLAG_ALLOW_RETRY, leaving = block->state == VMEM_LEAVING;
	struct vmem_range *region = block->region;
	struct file *file = vmf->vma->vm_file;
	unsigned int state = TASK_KILLABLE | (retry ? TASK_FREEZABLE_UNSAFE : 0);
	struct vmem_ctx *ctx = region->ctx;
	bool gone = region->dead || ctx->dead || block->state == VMEM_FAILED ||
		    !vmem_may_wait(vmf, ctx);
	u32 answers = block->answers;
	long timeout = HZ;
	bool served;

	if (gone || (expired && !leaving && time_before(jiffies, block->deadline + VMEM_EXPIRED))) {
		vmem_unlock(ctx);
		vmem_block_put(block);
		vmem_add(gone ? vmem_sigbus : vmem_timeouts, 1);
		return VM_FAULT_SIGBUS;
	}
	/* The REMOVE that takes the block out answers it before long; then it is reported. */
	if (!leaving) {
		if (expired || !(block->flags & VMEM_STATE_WAITED))
			vmem_report(vmf, block);
		timeout = max_t(long, block->deadline - jiffies, 0) + 1;
		vmem_add(vmem_faults_protected, block->state == VMEM_PRESENT);
	}
	vmem_unlock(ctx);
	if (vmf->flags & FAULT_FLAG_RETRY_NOWAIT) {
		vmem_block_put(block);
		return VM_FAULT_RETRY;
	}
	if (retry) {
		/* A signal may interrupt an access that can start anew: one of user code. */
		if (vmf->flags & FAULT_FLAG_USER && vmf->flags & FAULT_FLAG_INTERRUPTIBLE)
			state = TASK_INTERRUPTIBLE;
		else	/* it returns to check whether its cgroup freezes */
			timeout = min_t(long, timeout, VMEM_FREEZE_LOOK);
		/* Without the lock the mapping may go, and with it region and file. */
		get_file(file);
		kref_get(&region->ref);
		release_fault_lock(vmf);
	} else {
		timeout = min_t(long, timeout, msecs_to_jiffies(VMEM_HELD_WAIT_MS));
	}
	vmem_add(vmem_waits, 1);
	___wait_event(*vmem_block_queue(block),
		      ___wait_cond_timeout(READ_ONCE(block->answers) != answers ||
					   READ_ONCE(region->dead) || READ_ONCE(ctx->dead)),
		      state, 0, timeout, __ret = schedule_timeout(__ret));
	vmem_lock(ctx);
	/* With mmap_lock held an answer without a block does not count: it could come for ever. */
	served = !retry && vmem_standing(vmf, region, 0);
	vmem_unlock(ctx);
	vmem_block_put(block);
	if (retry) {
		vmem_range_put(region);
		fput(file);
		return VM_FAULT_RETRY;
	}
	if ((!served && !vmem_fault_hmm(vmf)) || vmem_holds_up(vmf->vma->vm_mm)) {
		vmem_add(vmem_sigbus, 1);
		return VM_FAULT_SIGBUS;
	}
	if (!served)
		vmem_unmap_page(vmf);
	return VM_FAULT_NOPAGE;
}

/* Locks the page if, once locked, it is still the one to serve the fault with. */
static bool vmem_enter(struct vm_fault *vmf, struct vmem_range *range, struct page *page, u32 marks)
{
	bool stands;

	vmem_point();
	lock_page(page);
	vmem_lock(range->ctx);
	stands = vmem_standing(vmf, range, marks) == page;
	vmem_unlock(range->ctx);
	if (!stands)
		unlock_page(page);
	return stands;
}

static vm_fault_t vmem_fault(struct vm_fault *vmf)
{
	struct vmem_range *range = vmf->vma->vm_private_data;
	unsigned long page_index = vmf->pgoff - range->pgoff;
	unsigned long index = page_index >> range->unit_shift;
	struct vmem_ctx *ctx = range->ctx;
	struct vmem_block *block = NULL;
	struct page *page;
	bool moving;

	if (page_index >= range->pages || READ_ONCE(range->dead))
		return VM_FAULT_SIGBUS;
	if (range->kind == VMEM_KIND_REGION)
		vmem_add(vmem_fault_remote(vmf) ? vmem_faults_remote :
			 vmf->flags & FAULT_FLAG_WRITE ? vmem_faults_write : vmem_faults_read, 1);
	vmem_lock(ctx);
	while (!(page = vmem_standing(vmf, range, 0)) && range->kind == VMEM_KIND_REGION) {
		if (block)
			return vmem_wait(vmf, block);
		vmem_unlock(ctx);
		block = vmem_block_get(range, index, GFP_KERNEL_ACCOUNT);
		if (IS_ERR(block))
			return PTR_ERR(block) == -ENOMEM ? VM_FAULT_OOM : VM_FAULT_SIGBUS;
		vmem_lock(ctx);
	}
	/* User code comes again; the kernel would retry for ever with mmap_lock held. */
	moving = !page && vmf->flags & FAULT_FLAG_USER && xa_load(&range->units, index);
	if (page)
		get_page(page);
	vmem_unlock(ctx);
	if (block)
		vmem_block_put(block);
	if (moving)	/* RELEASE works on it, perhaps on this CPU: let it run */
		schedule_timeout_uninterruptible(1);
	if (!page)
		return moving ? VM_FAULT_NOPAGE : VM_FAULT_SIGBUS;
	/* Entries of a longterm region are writable at once: later stores are not seen. */
	if (!vmem_enter(vmf, range, page,
			VMEM_STATE_TOUCHED | (range->longterm ? VMEM_STATE_DIRTY : 0))) {
		put_page(page);
		return VM_FAULT_NOPAGE;	/* it moved meanwhile: the access comes again */
	}
	/* Core code would look for a broken page in the page cache, where this one is not. */
	if (PageHWPoison(page)) {
		unlock_page(page);
		put_page(page);
		return VM_FAULT_HWPOISON;
	}
	vmf->page = page;
	return VM_FAULT_LOCKED;
}

/*
 * The first store through an entry. A store that must wait loses its entry and comes again as a
 * fault, which may wait without mmap_lock and without core code's reference to the page.
 */
static vm_fault_t vmem_mkwrite(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;

	if (vmem_enter(vmf, vma->vm_private_data, vmf->page, VMEM_STATE_DIRTY))
		return VM_FAULT_LOCKED;
	vmem_unmap_page(vmf);
	return VM_FAULT_NOPAGE;
}

static void vmem_vma_open(struct vm_area_struct *vma)
{
	kref_get(&((struct vmem_range *)vma->vm_private_data)->ref);
}

static void vmem_vma_close(struct vm_area_struct *vma)
{
	vmem_range_put(vma->vm_private_data);
}

/* Pools and longterm regions: the kernel refuses long-term pins where stores are watched. */
const struct vm_operations_struct vmem_vm_ops = {
	.open = vmem_vma_open,
	.close = vmem_vma_close,
	.fault = vmem_fault,
};

/* Entries start read-only and each first store is seen: exact dirty marks, protection. */
const struct vm_operations_struct vmem_watched_vm_ops = {
	.open = vmem_vma_open,
	.close = vmem_vma_close,
	.fault = vmem_fault,
	.page_mkwrite = vmem_mkwrite,
};
