// SPDX-License-Identifier: GPL-2.0-only
/*
 * events.c - how the runtime hears: read(2), poll(2), eventfd
 *
 * The queue is a list of blocks, so an event costs no memory, a block is never in it
 * twice, and posting cannot fail.
 */

#include <linux/eventfd.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "vmem.h"

/* Something new is there. ctx->lock. */
void vmem_notify(struct vmem_ctx *ctx)
{
	lockdep_assert_held(&ctx->lock);
	if (ctx->eventfd)
		vmem_eventfd_signal(ctx->eventfd);
	wake_up(&ctx->event_wq);
}

/* Queues the block's event; its deadline is the caller's to set. ctx->lock. */
void vmem_post(struct vmem_block *block, unsigned long address, u32 thread, u32 flags)
{
	struct vmem_ctx *ctx = block->region->ctx;

	block->posted = true;
	block->address = address;
	block->thread = thread;
	block->fault_flags = flags;
	list_add_tail(&block->event, &ctx->events);
	vmem_count(vmem_c_events);
	vmem_notify(ctx);
}

static bool vmem_has_events(struct vmem_ctx *ctx)
{
	return !list_empty_careful(&ctx->events) || READ_ONCE(ctx->pressure_bytes) ||
	       READ_ONCE(ctx->knobs_seen) != atomic_read(&vmem_knobs_seq);
}

/* The next event; of a fault also its block, the region referenced. False: none. */
static bool vmem_take_event(struct vmem_ctx *ctx, struct vmem_event *event, struct vmem_block **block)
{
	u32 seq = atomic_read(&vmem_knobs_seq);

	memset(event, 0, sizeof(*event));
	*block = NULL;
	spin_lock(&ctx->lock);
	if (ctx->pressure_bytes) {
		event->type = VMEM_EVENT_PRESSURE;
		event->bytes = ctx->pressure_bytes;
		ctx->pressure_bytes = 0;
	} else if (ctx->knobs_seen != seq) {
		event->type = VMEM_EVENT_KNOBS;
		ctx->knobs_seen = seq;
	} else if (!list_empty(&ctx->events)) {
		*block = list_first_entry(&ctx->events, struct vmem_block, event);
		list_del_init(&(*block)->event);
		kref_get(&(*block)->region->ref);
		event->type = VMEM_EVENT_FAULT;
		event->flags = (*block)->fault_flags;
		event->offset = vmem_unit_offset((*block)->region, (*block)->index);
		event->address = (*block)->address;
		event->thread = (*block)->thread;
	}
	spin_unlock(&ctx->lock);
	return event->type;
}

/* The reader could not take it: as if it had never been taken. */
static void vmem_return_event(struct vmem_ctx *ctx, struct vmem_event *event, struct vmem_block *block)
{
	spin_lock(&ctx->lock);
	if (event->type == VMEM_EVENT_PRESSURE)
		ctx->pressure_bytes += event->bytes;
	else if (event->type == VMEM_EVENT_KNOBS)
		ctx->knobs_seen--;
	else if (block->posted && list_empty(&block->event) && !block->region->dead)
		list_add(&block->event, &ctx->events);
	spin_unlock(&ctx->lock);
}

ssize_t vmem_read(struct file *file, char __user *buf, size_t size, loff_t *pos)
{
	struct vmem_ctx *ctx = file->private_data;
	struct vmem_event event;
	struct vmem_block *block;
	size_t done = 0;
	bool bad = false;

	if (!READ_ONCE(ctx->ready))
		return -EPROTO;
	if (size < sizeof(event))
		return -EINVAL;
	while (size - done >= sizeof(event) && !bad && !READ_ONCE(ctx->dead)) {
		if (!vmem_take_event(ctx, &event, &block)) {
			if (done)
				break;
			if (file->f_flags & O_NONBLOCK)
				return -EAGAIN;
			if (wait_event_interruptible(ctx->event_wq,
						     vmem_has_events(ctx) || READ_ONCE(ctx->dead)))
				return -ERESTARTSYS;
			continue;
		}
		/* No lock: the buffer may lie in a region of this context, and wait. */
		bad = copy_to_user(buf + done, &event, sizeof(event));
		if (bad)
			vmem_return_event(ctx, &event, block);
		else
			done += sizeof(event);
		if (block)
			vmem_range_put(block->region);
	}
	return done ? done : bad ? -EFAULT : -ESHUTDOWN;
}

__poll_t vmem_poll(struct file *file, struct poll_table_struct *table)
{
	struct vmem_ctx *ctx = file->private_data;
	__poll_t mask = 0;

	poll_wait(file, &ctx->event_wq, table);
	if (vmem_has_events(ctx))
		mask |= EPOLLIN | EPOLLRDNORM;
	if (READ_ONCE(ctx->dead))
		mask |= EPOLLHUP | EPOLLERR;
	return mask;
}

int vmem_set_eventfd(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_eventfd *arg = argument;
	struct eventfd_ctx *eventfd = NULL;

	if (arg->pad || arg->fd < -1)
		return -EINVAL;
	if (arg->fd >= 0) {
		eventfd = eventfd_ctx_fdget(arg->fd);
		if (IS_ERR(eventfd))
			return PTR_ERR(eventfd);
	}
	spin_lock(&ctx->lock);
	swap(ctx->eventfd, eventfd);
	/* What is there already was signalled to nobody. */
	if (ctx->eventfd && vmem_has_events(ctx))
		vmem_eventfd_signal(ctx->eventfd);
	spin_unlock(&ctx->lock);
	if (eventfd)
		eventfd_ctx_put(eventfd);
	return 0;
}
