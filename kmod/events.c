// SPDX-License-Identifier: GPL-2.0-only
/*
 * events.c - events for the runtime: read(2), poll(2), eventfd; and memory pressure
 * The queue is a list of blocks: an event needs no memory, comes once, and posting cannot fail.
 */

#include <linux/memcontrol.h>
#include <linux/poll.h>

#include "vmem.h"

#define VMEM_ANSWER_TIME	(2 * HZ)	/* without a release: it does not answer */
#define VMEM_ASKED_HALF		(5 * HZ)
#define VMEM_ASK_FRAMES		128UL		/* looked at in one go, under a lock */
#define VMEM_LINGER		(HZ / 50)	/* each time a cgroup at its limit is scanned */

/* Announces a new event. Needs ctx->lock. */
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

/* Takes the next event; of a fault also its block, in use, the region referenced. False: none. */
static bool vmem_take(struct vmem_ctx *ctx, struct vmem_event *event, struct vmem_block **block)
{
	int seq = atomic_read(&vmem_knobs_seq);

	*event = (struct vmem_event){};
	*block = NULL;
	vmem_lock(ctx);
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
	vmem_unlock(ctx);
	return event->type;
}

/* Puts an event back that the reader could not take. */
static void vmem_give_back(struct vmem_ctx *ctx, struct vmem_event *event, struct vmem_block *block)
{
	vmem_lock(ctx);
	if (event->type == VMEM_EVENT_PRESSURE)
		ctx->pressure_bytes += event->bytes;
	else if (event->type == VMEM_EVENT_KNOBS)
		ctx->knobs_seen--;
	else if (block->flags & VMEM_STATE_WAITED && list_empty(&block->event) &&
		 !block->region->dead)
		list_add(&block->event, &ctx->events);
	vmem_unlock(ctx);
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
	vmem_lock(ctx);
	swap(ctx->eventfd, eventfd);
	/* Events that are there already were not signalled to it. */
	if (ctx->eventfd && vmem_has_events(ctx))
		eventfd_signal(ctx->eventfd);
	vmem_unlock(ctx);
	if (eventfd)
		eventfd_ctx_put(eventfd);
	return 0;
}

/*
 * The shrinker: docs/kernel-module.md, "Memory is short". It asks contexts, by an event. It runs in
 * allocations of other processes, so it waits for no context's lock. Only a thread that is about to
 * fail at its own cgroup's limit gives contexts there time to answer.
 */
struct list_lru vmem_frames;
DECLARE_WAIT_QUEUE_HEAD(vmem_given);

/* Halves what was requested every five seconds: a shortage after that is new. Needs ctx->lock. */
u64 vmem_asked(struct vmem_ctx *ctx)
{
	unsigned long halves = (jiffies - ctx->asked_at) / VMEM_ASKED_HALF;

	lockdep_assert_held(&ctx->lock);
	ctx->asked_at += halves * VMEM_ASKED_HALF;
	ctx->asked_bytes >>= min(halves, 63UL);
	if (ctx->asked_bytes < PAGE_SIZE)
		ctx->asked_bytes = 0;
	ctx->pressure_bytes = min(ctx->pressure_bytes, ctx->asked_bytes);
	return ctx->asked_bytes;
}

/* True if a cgroup around @memcg is at its limit, and page cache on the way is no way out. */
static bool vmem_memcg_short(struct mem_cgroup *memcg)
{
#ifdef CONFIG_MEMCG
	unsigned long limit, *pages, cache = 0;
	int nid, zone;

	for (; memcg && parent_mem_cgroup(memcg); memcg = parent_mem_cgroup(memcg)) {
		for_each_node_state(nid, N_MEMORY)
			for (zone = 0; zone < MAX_NR_ZONES; zone++) {
				pages = memcg->nodeinfo[nid]->lru_zone_size[zone];
				cache += READ_ONCE(pages[LRU_INACTIVE_FILE]) +
					 READ_ONCE(pages[LRU_ACTIVE_FILE]);
			}
		limit = min(READ_ONCE(memcg->memory.max), READ_ONCE(memcg->memory.high));
		if (limit < PAGE_COUNTER_MAX && limit + cache < page_counter_read(&memcg->memory) +
		    limit / 100 * vmem_get(vmem_pressure_percent))
			return true;
	}
#endif
	return false;
}

static unsigned long vmem_shrink_count(struct shrinker *shrinker, struct shrink_control *sc)
{
	unsigned long frames = 0, all;
	int nid;

	/* While the module loads there may be no list yet: see vmem_shrinker_start(). */
	if (vmem_get(vmem_frame_bytes))
		for_each_node_state(nid, N_MEMORY)
			frames += list_lru_count_one(&vmem_frames, nid, sc->memcg);
	if (!frames)
		return SHRINK_EMPTY;
	all = max(1UL, list_lru_count(&vmem_frames));
	/* Page cache that churns is no shortage: available memory needs no help from us. */
	if (!vmem_memcg_short(sc->memcg) && si_mem_available() >=
	    (long)(totalram_pages() / 100 * vmem_get(vmem_pressure_percent)))
		return 0;
	/* In pages, as if all frames had one size. */
	return max(1UL, mult_frac(vmem_get(vmem_frame_bytes) >> PAGE_SHIFT, frames, all));
}

struct vmem_asking {
	u64 bytes;	/* still wanted */
	int nid;	/* on this node, or NUMA_NO_NODE */
	bool hope;	/* a context that was asked may answer yet */
};

/* Asks the context of one frame for as much as the frame has. Under the list's lock. */
static enum lru_status vmem_ask(VMEM_LRU_ITEM)
{
	struct vmem_frame *frame = container_of(item, struct vmem_frame, link);
	struct vmem_ctx *ctx = frame->ctx;
	struct vmem_asking *asking = arg;
	u64 bytes;

	if (!asking->bytes)
		return LRU_SKIP;
	if (asking->nid != NUMA_NO_NODE && asking->nid != page_to_nid(frame->piece[0]))
		return LRU_ROTATE;
	if (!spin_trylock(&ctx->lock))
		return LRU_ROTATE;	/* busy: asked for another frame, or next time */
	if (!vmem_asked(ctx)) {
		ctx->asked_at = jiffies;
		ctx->answered_at = jiffies;
		ctx->asked_reported = false;
	}
	if (time_before(jiffies, ctx->answered_at + VMEM_ANSWER_TIME)) {
		asking->hope = true;
	} else if (!ctx->asked_reported) {
		ctx->asked_reported = true;
		vmem_add(vmem_pressure_unanswered, 1);
		pr_info_ratelimited("vmem: process %d gives back none of its %llu MiB of frames\n",
				    pid_nr(ctx->owner), ctx->frame_bytes >> 20);
	}
	bytes = min3((u64)frame->pieces * (PAGE_SIZE << frame->order), asking->bytes,
		     ctx->frame_bytes - min(ctx->frame_bytes, ctx->asked_bytes));
	asking->bytes -= bytes;
	ctx->asked_bytes += bytes;
	ctx->pressure_bytes += bytes;
	if (bytes && ctx->pressure_bytes == bytes) {	/* else there is an unread event */
		vmem_add(vmem_pressure_requests, 1);
		vmem_notify(ctx);
	}
	spin_unlock(&ctx->lock);
	return LRU_ROTATE;
}

static unsigned long vmem_shrink_scan(struct shrinker *shrinker, struct shrink_control *sc)
{
	bool own = false, limit = vmem_memcg_short(sc->memcg);
	struct vmem_asking asking = { .bytes = (u64)sc->nr_to_scan << PAGE_SHIFT,
				      .nid = limit ? NUMA_NO_NODE : sc->nid };
	s64 before = vmem_get(vmem_frame_bytes);
	int nid;

	for_each_node_state(nid, N_MEMORY) {
		unsigned long frames = min(sc->nr_to_scan, VMEM_ASK_FRAMES);

		list_lru_walk_one(&vmem_frames, nid, sc->memcg, vmem_ask, &asking, &frames);
	}
#ifdef CONFIG_MEMCG
	rcu_read_lock();
	own = limit && mem_cgroup_from_task(current) == sc->memcg;
	rcu_read_unlock();
#endif
	/* A thread that asks for its own cgroup, may sleep, and need not fail waits a little. */
	if (own && asking.hope && !(current->flags & (PF_KTHREAD | PF_EXITING)) &&
	    (sc->gfp_mask & (GFP_KERNEL | __GFP_NORETRY | __GFP_RETRY_MAYFAIL)) == GFP_KERNEL)
		wait_event_killable_timeout(vmem_given, vmem_get(vmem_frame_bytes) < before,
					    VMEM_LINGER);
	return SHRINK_STOP;
}

struct shrinker vmem_shrinker_model = {
	.count_objects = vmem_shrink_count,
	.scan_objects = vmem_shrink_scan,
	.batch = 1024,		/* pages: requested at a time */
	.seeks = DEFAULT_SEEKS,
	.flags = SHRINKER_MEMCG_AWARE | SHRINKER_NUMA_AWARE | SHRINKER_NONSLAB,
};
