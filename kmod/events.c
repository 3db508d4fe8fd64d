// SPDX-License-Identifier: GPL-2.0-only
/*
 * events.c - how the runtime hears: read(2), poll(2), eventfd; and of short memory
 *
 * The queue is a list of blocks, so an event costs no memory, a block is never in it
 * twice, and posting cannot fail.
 */

#include <linux/poll.h>

#include "vmem.h"

#define VMEM_ANSWER_TIME	(2 * HZ)
#define VMEM_ASKED_OLD		(10 * HZ)	/* what was asked so long ago is forgotten */
#define VMEM_ASK_CONTEXTS	128	/* looked at in one go, under the list's lock */

/* Something new is there. ctx->lock. */
void vmem_notify(struct vmem_ctx *ctx)
{
	lockdep_assert_held(&ctx->lock);
	if (ctx->eventfd)
		eventfd_signal(ctx->eventfd);
	wake_up(&ctx->event_wq);
}

static bool vmem_has_events(struct vmem_ctx *ctx)
{
	return !list_empty_careful(&ctx->events) || READ_ONCE(ctx->pressure_bytes) ||
	       READ_ONCE(ctx->knobs_seen) != atomic_read(&vmem_knobs_seq);
}

/* The next event; of a fault also its block, in use, the region referenced. False: none. */
static bool vmem_take(struct vmem_ctx *ctx, struct vmem_event *event, struct vmem_block **block)
{
	int seq = atomic_read(&vmem_knobs_seq);

	*event = (struct vmem_event){};
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
		*event = (*block)->report;
		list_del_init(&(*block)->event);
		(*block)->users++;
		kref_get(&(*block)->region->ref);
	}
	spin_unlock(&ctx->lock);
	return event->type;
}

/* The reader could not take it: as if it had never been taken. */
static void vmem_give_back(struct vmem_ctx *ctx, struct vmem_event *event, struct vmem_block *block)
{
	spin_lock(&ctx->lock);
	if (event->type == VMEM_EVENT_PRESSURE)
		ctx->pressure_bytes += event->bytes;
	else if (event->type == VMEM_EVENT_KNOBS)
		ctx->knobs_seen--;
	else if (block->flags & VMEM_STATE_WAITED && list_empty(&block->event) &&
		 !block->region->dead)
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
		if (!vmem_take(ctx, &event, &block)) {
			if (done)
				break;
			if (file->f_flags & O_NONBLOCK)
				return -EAGAIN;
			if (wait_event_interruptible(ctx->event_wq,
						     vmem_has_events(ctx) || READ_ONCE(ctx->dead)))
				return -ERESTARTSYS;
			continue;
		}
		vmem_point();
		/* No lock: the buffer may lie in a region of this context, and wait. */
		bad = copy_to_user(buf + done, &event, sizeof(event));
		if (bad)
			vmem_give_back(ctx, &event, block);
		else
			done += sizeof(event);
		if (block) {
			struct vmem_range *region = block->region;

			vmem_block_put(block);
			vmem_range_put(region);
		}
	}
	return done ? done : bad ? -EFAULT : -ESHUTDOWN;
}

__poll_t vmem_poll(struct file *file, struct poll_table_struct *table)
{
	struct vmem_ctx *ctx = file->private_data;

	poll_wait(file, &ctx->event_wq, table);
	return (vmem_has_events(ctx) ? EPOLLIN | EPOLLRDNORM : 0) |
	       (READ_ONCE(ctx->dead) ? EPOLLHUP | EPOLLERR : 0);
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
		eventfd_signal(ctx->eventfd);
	spin_unlock(&ctx->lock);
	if (eventfd)
		eventfd_ctx_put(eventfd);
	return 0;
}

/*
 * When the machine is short of memory the shrinker frees nothing itself, as only the
 * runtime knows which frame can go. It divides what is wanted among contexts by what
 * they hold, posts an event, and reports who does not answer. It takes only
 * spinlocks, since it runs in the middle of other people's allocations.
 */
static unsigned long vmem_shrink_count(struct shrinker *shrinker, struct shrink_control *sc)
{
	/* Page cache that churns is no shortage: what is available can be had without us. */
	if (si_mem_available() >= (long)(totalram_pages() / 100 * vmem_get(vmem_pressure_percent)))
		return SHRINK_EMPTY;
	return vmem_get(vmem_frame_bytes) >> PAGE_SHIFT ?: SHRINK_EMPTY;
}

static void vmem_ask(struct vmem_ctx *ctx, u64 bytes)
{
	bool late;

	spin_lock(&ctx->lock);
	if (!ctx->asked_bytes) {
		ctx->asked_since = jiffies;
		ctx->asked_reported = false;
	}
	late = !ctx->asked_reported && time_after(jiffies, ctx->asked_since + VMEM_ANSWER_TIME);
	ctx->asked_reported |= late;
	/* Who took so long will not do it: ask for what is wanted now. */
	if (time_after(jiffies, ctx->asked_since + VMEM_ASKED_OLD)) {
		ctx->asked_bytes = 0;
		ctx->pressure_bytes = 0;
		ctx->asked_since = jiffies;
	}
	bytes = min(bytes, ctx->frame_bytes - min(ctx->frame_bytes, ctx->asked_bytes));
	if (bytes) {
		ctx->asked_bytes += bytes;
		ctx->pressure_bytes += bytes;
		vmem_add(vmem_pressure_requests, 1);
		vmem_notify(ctx);
	}
	spin_unlock(&ctx->lock);
	if (late) {
		vmem_add(vmem_pressure_unanswered, 1);
		pr_info_ratelimited("vmem: process %d gives back none of its %llu MiB of frames\n",
				    pid_nr(ctx->owner), READ_ONCE(ctx->frame_bytes) >> 20);
	}
}

static unsigned long vmem_shrink_scan(struct shrinker *shrinker, struct shrink_control *sc)
{
	u64 all = vmem_get(vmem_frame_bytes);
	u64 want = (u64)sc->nr_to_scan << PAGE_SHIFT;
	unsigned int n = min_t(u64, vmem_get(vmem_contexts), VMEM_ASK_CONTEXTS);
	struct vmem_ctx *ctx;

	if (!all)
		return SHRINK_STOP;
	spin_lock(&vmem_ctx_list_lock);
	/* The next call goes on where this one ends. */
	while (n-- && !list_empty(&vmem_ctx_list)) {
		u64 own;

		list_rotate_left(&vmem_ctx_list);
		ctx = list_last_entry(&vmem_ctx_list, struct vmem_ctx, link);
		own = READ_ONCE(ctx->frame_bytes);
		if (own)
			vmem_ask(ctx, PAGE_ALIGN(mul_u64_u64_div_u64(want, own, all)));
	}
	spin_unlock(&vmem_ctx_list_lock);
	return SHRINK_STOP;
}

struct shrinker vmem_shrinker_model = {
	.count_objects = vmem_shrink_count,
	.scan_objects = vmem_shrink_scan,
	.seeks = DEFAULT_SEEKS,
};
