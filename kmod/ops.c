// SPDX-License-Identifier: GPL-2.0-only
/*
 * ops.c - batches of operations on blocks, and the end of a region
 *
 * INSTALL, FAIL and the like are a change of state under ctx->lock. REMOVE, PROTECT
 * and WATCH unmap, which sleeps, so they take three steps:
 *
 *  1. begin, under the lock: the new state, and busy = true, which turns every other
 *     operation on the block away (-EINPROGRESS)
 *  2. barrier (see vmem_frame_barrier()), then unmap: no entry of the old state is
 *     left, the GPU's included
 *  3. finish, under the lock: if somebody still pins the frame the old state comes
 *     back, as if nothing had been asked
 *
 * A batch does each step for all of its operations and unmaps neighbours at once.
 */

#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "vmem.h"

struct vmem_task {
	struct vmem_range *region;	/* referenced from begin to the batch's end */
	struct vmem_block *block;	/* set while steps 2 and 3 are due */
	bool was_protected;
};

static u32 vmem_block_flags(const struct vmem_block *block)
{
	u32 flags = 0;

	if (block->state == VMEM_PRESENT || block->state == VMEM_LEAVING)
		flags |= VMEM_STATE_PRESENT;
	if (block->state == VMEM_FAILED)
		flags |= VMEM_STATE_FAILED;
	if (block->dirty)
		flags |= VMEM_STATE_DIRTY;
	if (block->protect)
		flags |= VMEM_STATE_PROTECTED;
	if (block->touched)
		flags |= VMEM_STATE_TOUCHED;
	if (block->posted)
		flags |= VMEM_STATE_WAITED;
	return flags;
}

static bool vmem_aligned(const struct vmem_range *range, u64 offset)
{
	return !((offset - ((u64)range->pgoff << PAGE_SHIFT)) & (vmem_unit_bytes(range) - 1));
}

static unsigned long vmem_index(const struct vmem_range *range, u64 offset)
{
	return ((offset >> PAGE_SHIFT) - range->pgoff) >> range->unit_shift;
}

static int vmem_install(struct vmem_ctx *ctx, struct vmem_block *block, const struct vmem_op *op)
{
	struct vmem_range *pool = vmem_range_find(ctx, op->frame, VMEM_KIND_POOL);
	struct vmem_range *region = block->region;
	struct vmem_frame *frame;
	int err = 0;

	if (!pool)
		return -ENXIO;
	if (!vmem_aligned(pool, op->frame) || pool->unit_shift != region->unit_shift) {
		vmem_range_put(pool);
		return -EINVAL;
	}
	/* A frame out of a destroyed region may be under somebody's DMA still. */
	spin_lock(&ctx->lock);
	frame = xa_load(&pool->units, vmem_index(pool, op->frame));
	if (region->dead)
		err = -ESHUTDOWN;
	else if (block->busy)
		err = -EINPROGRESS;
	else if (block->state == VMEM_PRESENT)
		err = -EEXIST;
	else if (!frame)
		err = -ENOENT;
	else if (frame->state != VMEM_FREE)
		err = frame->state == VMEM_INSTALLED ? -EADDRINUSE : -EINPROGRESS;
	else if (frame->suspect && vmem_frame_pins(frame) > frame->base_pins)
		err = -EBUSY;
	if (!err) {
		frame->state = VMEM_INSTALLED;
		frame->suspect = false;
		frame->base_pins = vmem_frame_pins(frame);
		frame->block = block;
		block->frame = frame;
		block->state = VMEM_PRESENT;
		block->protect = op->flags & VMEM_OPF_PROTECT;
		block->dirty = false;
		block->touched = false;
		ctx->installed_bytes += vmem_unit_bytes(region);
		vmem_add(vmem_c_installed_bytes, vmem_unit_bytes(region));
		vmem_block_answer(block);
	}
	spin_unlock(&ctx->lock);
	vmem_range_put(pool);
	return err;
}

/* The frame is its pool's again. ctx->lock. */
static void vmem_detach(struct vmem_ctx *ctx, struct vmem_block *block)
{
	block->frame->state = VMEM_FREE;
	block->frame->block = NULL;
	block->frame = NULL;
	block->state = VMEM_ABSENT;
	block->protect = false;
	block->dirty = false;
	block->touched = false;
	ctx->installed_bytes -= vmem_unit_bytes(block->region);
	vmem_add(vmem_c_installed_bytes, -(s64)vmem_unit_bytes(block->region));
}

static u32 vmem_op_flags(u32 op)
{
	switch (op) {
	case VMEM_OP_INSTALL:
		return VMEM_OPF_PROTECT;
	case VMEM_OP_PROTECT:
		return VMEM_OPF_CLEAN;
	}
	return 0;
}

/* Step 1 of an operation on a known block; complete unless it sets task->block. ctx->lock. */
static int vmem_begin_locked(struct vmem_block *block, struct vmem_op *op, struct vmem_task *task)
{
	bool present = block->state == VMEM_PRESENT;

	op->state = vmem_block_flags(block);
	if (op->op == VMEM_OP_QUERY) {
		if (block->frame)
			op->frame = vmem_unit_offset(block->frame->pool, block->frame->index);
		return 0;
	}
	if (block->region->dead)
		return -ESHUTDOWN;
	if (op->op == VMEM_OP_WAKE) {
		vmem_block_answer(block);
		return 0;
	}
	if (block->busy)
		return -EINPROGRESS;
	switch (op->op) {
	case VMEM_OP_FAIL:
		if (block->state != VMEM_ABSENT)
			return present ? -EEXIST : -EALREADY;
		block->state = VMEM_FAILED;
		vmem_block_answer(block);
		return 0;
	case VMEM_OP_UNFAIL:
		if (block->state != VMEM_FAILED)
			return -ENODATA;
		block->state = VMEM_ABSENT;
		return 0;
	}
	if (!present)
		return -ENOENT;
	task->was_protected = block->protect;
	switch (op->op) {
	case VMEM_OP_UNPROTECT:
		block->protect = false;
		vmem_block_answer(block);
		return 0;
	case VMEM_OP_REMOVE:
		op->frame = vmem_unit_offset(block->frame->pool, block->frame->index);
		block->state = VMEM_LEAVING;
		break;
	case VMEM_OP_PROTECT:
		block->protect = true;
		if (op->flags & VMEM_OPF_CLEAN)
			block->dirty = false;
		break;
	case VMEM_OP_WATCH:
		/* Cleared before the unmapping: a store after it sets the mark again. */
		block->dirty = false;
		break;
	}
	block->busy = true;
	task->block = block;
	return 0;
}

static int vmem_begin(struct vmem_ctx *ctx, struct vmem_op *op, struct vmem_task *task)
{
	bool create = op->op == VMEM_OP_INSTALL || op->op == VMEM_OP_FAIL;
	struct vmem_range *region;
	struct vmem_block *block;
	unsigned long index;
	int err;

	op->state = 0;
	if (op->op < VMEM_OP_INSTALL || op->op > VMEM_OP_QUERY || op->flags & ~vmem_op_flags(op->op))
		return -EINVAL;
	region = vmem_range_find(ctx, op->block, VMEM_KIND_REGION);
	if (!region)
		return -ENXIO;
	task->region = region;
	if (!vmem_aligned(region, op->block))
		return -EINVAL;
	if (region->longterm && (op->op == VMEM_OP_PROTECT || op->op == VMEM_OP_WATCH ||
				 op->flags & VMEM_OPF_PROTECT))
		return -EOPNOTSUPP;
	index = vmem_index(region, op->block);
	block = create ? vmem_block_get(region, index) : xa_load(&region->units, index);
	if (!block) {
		/* Never touched. */
		if (create)
			return -ENOMEM;
		if (op->op == VMEM_OP_UNFAIL)
			return -ENODATA;
		return op->op == VMEM_OP_QUERY || op->op == VMEM_OP_WAKE ? 0 : -ENOENT;
	}
	if (op->op == VMEM_OP_INSTALL) {
		spin_lock(&ctx->lock);
		op->state = vmem_block_flags(block);
		spin_unlock(&ctx->lock);
		return vmem_install(ctx, block, op);
	}
	spin_lock(&ctx->lock);
	err = vmem_begin_locked(block, op, task);
	spin_unlock(&ctx->lock);
	return err;
}

static void vmem_finish(struct vmem_ctx *ctx, struct vmem_op *op, struct vmem_task *task,
			unsigned int *patience_us)
{
	struct vmem_block *block = task->block;
	bool pinned = vmem_frame_pinned(block->frame, block->frame->base_pins, &block->held, patience_us);

	spin_lock(&ctx->lock);
	block->busy = false;
	if (op->op == VMEM_OP_REMOVE && !pinned) {
		vmem_detach(ctx, block);
		vmem_block_answer(block);
	} else {
		/* Present still; who came while it was leaving is served or reported now. */
		block->state = VMEM_PRESENT;
		if (pinned) {
			block->protect = task->was_protected;
			if (op->state & VMEM_STATE_DIRTY)
				block->dirty = true;
			op->result = -EBUSY;
			vmem_count(vmem_c_refused_pinned);
		}
		vmem_block_kick(block);
	}
	spin_unlock(&ctx->lock);
	task->block = NULL;
}

/* Unmaps the blocks of all pending tasks, neighbours in one go. */
static void vmem_unmap(struct vmem_ctx *ctx, struct vmem_task *tasks, unsigned int count)
{
	u64 start = 0, end = 0;
	unsigned int i;

	for (i = 0; i <= count; i++) {
		u64 offset = 0, size = 0;

		if (i < count) {
			if (!tasks[i].block)
				continue;
			offset = vmem_unit_offset(tasks[i].region, tasks[i].block->index);
			size = vmem_unit_bytes(tasks[i].region);
			if (end == offset && end > start) {
				end += size;
				continue;
			}
		}
		if (end > start)
			unmap_mapping_range(ctx->inode->i_mapping, start, end - start, 1);
		start = offset;
		end = offset + size;
	}
}

int vmem_batch(struct vmem_ctx *ctx, void *argument)
{
	unsigned int patience_us = VMEM_PATIENCE_US;
	struct vmem_batch *arg = argument;
	struct vmem_op __user *user = u64_to_user_ptr(arg->ops);
	struct vmem_task *tasks;
	struct vmem_op *ops;
	unsigned int i;
	int err = 0;

	arg->done = 0;
	if (arg->pad || arg->flags || !arg->count || arg->count > VMEM_BATCH_MAX)
		return -EINVAL;
	ops = kvmalloc_array(arg->count, sizeof(*ops), GFP_KERNEL_ACCOUNT);
	tasks = kvcalloc(arg->count, sizeof(*tasks), GFP_KERNEL_ACCOUNT);
	if (!ops || !tasks) {
		err = -ENOMEM;
		goto out;
	}
	if (copy_from_user(ops, user, arg->count * sizeof(*ops))) {
		err = -EFAULT;
		goto out;
	}
	for (i = 0; i < arg->count; i++)
		ops[i].result = vmem_begin(ctx, &ops[i], &tasks[i]);
	for (i = 0; i < arg->count; i++)
		if (tasks[i].block)
			vmem_frame_barrier(tasks[i].block->frame);
	vmem_unmap(ctx, tasks, arg->count);
	for (i = 0; i < arg->count; i++) {
		if (tasks[i].block)
			vmem_finish(ctx, &ops[i], &tasks[i], &patience_us);
		if (tasks[i].region)
			vmem_range_put(tasks[i].region);
		arg->done += !ops[i].result;
		cond_resched();
	}
	if (copy_to_user(user, ops, arg->count * sizeof(*ops)))
		err = -EFAULT;
out:
	kvfree(tasks);
	kvfree(ops);
	return err;
}

/*
 * The end of a region that is marked dead: parked threads leave with SIGBUS, frames go
 * back. Waits for operations under way, which end by themselves. May sleep.
 */
void vmem_region_empty(struct vmem_range *region)
{
	unsigned int patience_us = VMEM_PATIENCE_US;
	struct vmem_ctx *ctx = region->ctx;
	struct vmem_block *block;
	unsigned long index;

	for (index = 0; index < VMEM_QUEUES; index++)
		wake_up_all(&ctx->fault_wq[index]);
	xa_for_each(&region->units, index, block) {
		wait_event(*vmem_block_queue(block), !READ_ONCE(block->busy));
		spin_lock(&ctx->lock);
		list_del_init(&block->event);
		block->posted = false;
		if (block->state == VMEM_PRESENT)
			block->state = VMEM_LEAVING;
		spin_unlock(&ctx->lock);
		if (block->state == VMEM_LEAVING)
			vmem_frame_barrier(block->frame);
		cond_resched();
	}
	unmap_mapping_range(ctx->inode->i_mapping, (loff_t)region->pgoff << PAGE_SHIFT,
			    (loff_t)region->pages << PAGE_SHIFT, 1);
	xa_for_each(&region->units, index, block) {
		struct vmem_frame *frame = block->frame;

		if (block->state != VMEM_LEAVING)
			continue;
		frame->suspect = vmem_frame_pinned(frame, frame->base_pins, &block->held, &patience_us);
		spin_lock(&ctx->lock);
		vmem_detach(ctx, block);
		vmem_block_kick(block);
		spin_unlock(&ctx->lock);
		cond_resched();
	}
}
