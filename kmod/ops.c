// SPDX-License-Identifier: GPL-2.0-only
/*
 * ops.c - batches of operations on blocks, and the end of a region
 * INSTALL, FAIL and others are a change of state under ctx->lock. The rest have three steps
 * (docs/kernel-module.md, "How a block leaves"): (1) the new state, and busy, which refuses other
 * operations; (2) barrier and unmapping; (3) the end, or the old state. A batch does each for all.
 */
#include "vmem.h"

struct vmem_task {
	struct vmem_range *region;	/* referenced from begin to the batch's end */
	struct vmem_block *block;	/* in use while steps 2 and 3 are to come, else NULL */
};

/* Puts @frame into the block, or (NULL) returns the block's to its pool. Needs ctx->lock. */
static void vmem_put_frame(struct vmem_block *block, struct vmem_frame *frame, u32 flags)
{
	s64 bytes = vmem_unit_bytes(block->region) * (frame ? 1 : -1);

	(frame ?: block->frame)->state = frame ? VMEM_INSTALLED : VMEM_FREE;
	block->frame = frame;
	block->state = frame ? VMEM_PRESENT : VMEM_ABSENT;
	block->flags = flags;
	block->region->ctx->installed_bytes += bytes;
	vmem_add(vmem_installed_bytes, bytes);
	vmem_block_answer(block);
}

/* Needs ctx->lock. */
static int vmem_install(struct vmem_block *block, struct vmem_frame *frame, u32 flags)
{
	if (block->state == VMEM_PRESENT)
		return -EEXIST;
	if (!frame)
		return -ENOENT;
	if (frame->state != VMEM_FREE)
		return frame->state == VMEM_INSTALLED ? -EADDRINUSE : -EINPROGRESS;
	/* A frame of a destroyed region may be under DMA, or in a pipe. */
	if (frame->suspect && (vmem_frame_pins(frame) > frame->base_pins ||
			       vmem_frame_held(frame, false)))
		return -EBUSY;
	if (vmem_frame_broken(frame))
		return -EHWPOISON;
	frame->suspect = false;
	frame->base_pins = vmem_frame_pins(frame);
	vmem_put_frame(block, frame, flags & VMEM_OPF_PROTECT ? VMEM_STATE_PROTECTED : 0);
	return 0;
}

/* Step 1 of an operation on a known block; complete unless it sets task->block. Needs ctx->lock. */
static int vmem_begin_locked(struct vmem_block *block, struct vmem_range *pool, unsigned long slot,
			     struct vmem_op *op, struct vmem_task *task)
{
	if (op->op == VMEM_OP_QUERY) {
		if (block->frame)
			op->frame = block->frame->offset;
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
	if (op->op >= VMEM_OP_REMOVE && op->op <= VMEM_OP_WATCH && block->state != VMEM_PRESENT)
		return -ENOENT;
	switch (op->op) {
	case VMEM_OP_INSTALL:
		return vmem_install(block, xa_load(&pool->units, slot), op->flags);
	case VMEM_OP_FAIL:
		if (block->state != VMEM_ABSENT)
			return block->state == VMEM_PRESENT ? -EEXIST : -EALREADY;
		block->state = VMEM_FAILED;
		vmem_block_answer(block);
		return 0;
	case VMEM_OP_UNFAIL:
		if (block->state != VMEM_FAILED)
			return -ENODATA;
		block->state = VMEM_ABSENT;
		return 0;
	case VMEM_OP_UNPROTECT:
		block->flags &= ~VMEM_STATE_PROTECTED;
		vmem_block_answer(block);
		return 0;
	case VMEM_OP_REMOVE:
		op->frame = block->frame->offset;
		block->state = VMEM_LEAVING;
		break;
	case VMEM_OP_PROTECT:
		block->flags |= VMEM_STATE_PROTECTED;
		if (op->flags & VMEM_OPF_CLEAN)
			block->flags &= ~VMEM_STATE_DIRTY;
		break;
	case VMEM_OP_WATCH:
		/* Cleared before unmapping: a store after that sets the mark again. */
		block->flags &= ~VMEM_STATE_DIRTY;
		break;
	}
	block->busy = true;
	task->block = block;
	return 0;
}

static int vmem_begin(struct vmem_ctx *ctx, struct vmem_op *op, struct vmem_task *task)
{
	gfp_t gfp = op->op == VMEM_OP_INSTALL || op->op == VMEM_OP_FAIL ? VMEM_CALL_GFP : 0;
	bool watches = op->op == VMEM_OP_PROTECT || op->op == VMEM_OP_WATCH;
	u32 flags = op->op == VMEM_OP_INSTALL ? VMEM_OPF_PROTECT :
		    op->op == VMEM_OP_PROTECT ? VMEM_OPF_CLEAN : 0;
	struct vmem_range *region, *pool = NULL;
	unsigned long index, slot = 0;
	struct vmem_block *block;
	int err;

	op->state = 0;
	if (op->op < VMEM_OP_INSTALL || op->op > VMEM_OP_QUERY || op->flags & ~flags)
		return -EINVAL;
	region = vmem_units_find(ctx, op->block, VMEM_KIND_REGION, 1, &index);
	if (IS_ERR(region))
		return PTR_ERR(region);
	task->region = region;
	if (region->longterm && (watches || op->flags & VMEM_OPF_PROTECT))
		return -EOPNOTSUPP;
	block = vmem_block_get(region, index, gfp);
	if (IS_ERR(block))
		return PTR_ERR(block);
	if (!block)	/* absent, and no thread waits for it */
		return op->op == VMEM_OP_UNFAIL ? -ENODATA : op->op <= VMEM_OP_WATCH ? -ENOENT : 0;
	if (op->op == VMEM_OP_INSTALL)
		pool = vmem_units_find(ctx, op->frame, VMEM_KIND_POOL, 1, &slot);
	vmem_lock(ctx);
	op->state = block->flags | (block->frame ? VMEM_STATE_PRESENT : 0) |
		    (block->state == VMEM_FAILED ? VMEM_STATE_FAILED : 0);
	if (IS_ERR(pool))
		err = PTR_ERR(pool);
	else if (pool && pool->dead)
		err = -ENXIO;
	else if (pool && pool->unit_shift != region->unit_shift)
		err = -EINVAL;
	else
		err = vmem_begin_locked(block, pool, slot, op, task);
	vmem_unlock(ctx);
	if (!IS_ERR_OR_NULL(pool))
		vmem_range_put(pool);
	if (!task->block)
		vmem_block_put(block);
	return err;
}

static void vmem_finish(struct vmem_ctx *ctx, struct vmem_op *op, struct vmem_block *block,
			unsigned int *patience_us)
{
	bool pinned = fatal_signal_pending(current) ||	/* vmem_unmap() may have ended early */
		      vmem_frame_pinned(block->frame, block->frame->base_pins, patience_us);

	vmem_lock(ctx);
	block->busy = false;
	if (op->op == VMEM_OP_REMOVE && !pinned) {
		vmem_put_frame(block, NULL, 0);
	} else {
		/* Still present; faults that came while it was leaving are served or reported. */
		block->state = VMEM_PRESENT;
		if (pinned) {
			block->flags &= ~VMEM_STATE_PROTECTED;
			block->flags |= op->state & (VMEM_STATE_PROTECTED | VMEM_STATE_DIRTY);
			op->result = -EBUSY;
			vmem_add(vmem_refused_pinned, 1);
		}
		vmem_block_kick(block);
	}
	vmem_unlock(ctx);
}

/* Unmaps the blocks of all pending tasks, adjacent ones together, until the caller is killed. */
static void vmem_unmap(struct vmem_ctx *ctx, struct vmem_task *task, const struct vmem_task *end)
{
	for (; task < end && !fatal_signal_pending(current); task++) {
		u64 offset, bytes = 0;

		if (!task->block)
			continue;
		offset = task->block->offset;
		do {
			bytes += vmem_unit_bytes(task->region);
		} while (++task < end && task->block && task->block->offset == offset + bytes);
		unmap_mapping_range(ctx->inode->i_mapping, offset, bytes, 1);
		task--;
	}
}

int vmem_batch(struct vmem_ctx *ctx, void *argument)
{
	unsigned int patience_us = VMEM_PATIENCE_US;
	struct vmem_batch *arg = argument;
	struct vmem_op __user *user = u64_to_user_ptr(arg->ops);
	u64 few[VMEM_BATCH_FEW * (sizeof(struct vmem_task) + sizeof(struct vmem_op)) / 8] = {};
	struct vmem_task *tasks = (void *)few;
	struct vmem_op *ops;
	unsigned int i;
	int err = 0;

	arg->done = 0;
	if (arg->pad || arg->flags || !arg->count || arg->count > VMEM_BATCH_MAX)
		return -EINVAL;
	if (arg->count > VMEM_BATCH_FEW)
		tasks = kvcalloc(arg->count, sizeof(*tasks) + sizeof(*ops), VMEM_CALL_GFP);
	if (!tasks)
		return -ENOMEM;
	ops = (struct vmem_op *)(tasks + arg->count);
	if (copy_from_user(ops, user, arg->count * sizeof(*ops))) {
		err = -EFAULT;
		goto out;
	}
	for (i = 0; i < arg->count; i++)
		ops[i].result = vmem_begin(ctx, &ops[i], &tasks[i]);
	vmem_point();
	for (i = 0; i < arg->count; i++)
		if (tasks[i].block)
			vmem_frame_barrier(tasks[i].block->frame);
	vmem_point();
	vmem_unmap(ctx, tasks, tasks + arg->count);
	vmem_point();
	for (i = 0; i < arg->count; i++) {
		if (tasks[i].block) {
			vmem_finish(ctx, &ops[i], tasks[i].block, &patience_us);
			vmem_block_put(tasks[i].block);
		}
		if (tasks[i].region)
			vmem_range_put(tasks[i].region);
		arg->done += !ops[i].result;
		cond_resched();
	}
	if (copy_to_user(user, ops, arg->count * sizeof(*ops)))
		err = -EFAULT;
out:
	kvfree(tasks == (void *)few ? NULL : tasks);
	return err;
}

/*
 * Ends a region that is marked dead, so that nothing enters any more: parked threads leave with
 * SIGBUS, frames go back. Waits for operations under way, which end by themselves. May sleep.
 */
void vmem_region_empty(struct vmem_range *region)
{
	struct vmem_ctx *ctx = region->ctx;
	struct vmem_frame *frame;
	struct vmem_block *block;
	unsigned long index;

	xa_for_each(&region->units, index, block) {
		block = vmem_block_get(region, index, 0);
		if (!block)
			continue;
		wait_event(*vmem_block_queue(block), !READ_ONCE(block->busy));
		/* An operation gives the frame back after it clears busy, under the lock. */
		vmem_lock(ctx);
		frame = block->frame;
		vmem_unlock(ctx);
		if (frame)
			vmem_frame_barrier(frame);
		vmem_block_put(block);
		cond_resched();
	}
	vmem_point();
	unmap_mapping_range(ctx->inode->i_mapping, vmem_unit_offset(region, 0),
			    (loff_t)region->pages << PAGE_SHIFT, 1);
	xa_for_each(&region->units, index, block) {
		block = vmem_block_get(region, index, 0);
		if (!block)
			continue;
		vmem_lock(ctx);
		frame = block->frame;
		if (frame) {
			frame->suspect = true;
			vmem_put_frame(block, NULL, 0);
		} else {
			vmem_block_answer(block);
		}
		vmem_unlock(ctx);
		vmem_block_put(block);
		cond_resched();
	}
}
