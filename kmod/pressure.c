// SPDX-License-Identifier: GPL-2.0-only
/*
 * pressure.c - when the machine is short of memory, contexts are asked for frames
 *
 * The shrinker frees nothing itself, as only the runtime knows which frame can go. It
 * divides what is wanted among contexts by what they hold, posts an event, and
 * reports who does not answer. It takes only spinlocks, since it runs in the middle
 * of other people's allocations.
 */

#include <linux/pid.h>
#include <linux/shrinker.h>

#include "vmem.h"

#define VMEM_ANSWER_TIME	(2 * HZ)

static struct shrinker *vmem_shrinker;

static unsigned long vmem_shrink_count(struct shrinker *shrinker, struct shrink_control *sc)
{
	unsigned long pages = atomic64_read(&vmem_counters[vmem_c_frame_bytes]) >> PAGE_SHIFT;

	return pages ? pages : SHRINK_EMPTY;
}

static void vmem_ask(struct vmem_ctx *ctx, u64 bytes)
{
	bool report;

	spin_lock(&ctx->lock);
	bytes = min(bytes, ctx->frame_bytes - min(ctx->frame_bytes, ctx->asked_bytes));
	report = ctx->asked_bytes && !ctx->asked_reported &&
		 time_after(jiffies, ctx->asked_since + VMEM_ANSWER_TIME);
	if (report)
		ctx->asked_reported = true;
	if (bytes) {
		if (!ctx->asked_bytes) {
			ctx->asked_since = jiffies;
			ctx->asked_reported = false;
		}
		ctx->asked_bytes += bytes;
		ctx->pressure_bytes += bytes;
		vmem_count(vmem_c_pressure_requests);
		vmem_notify(ctx);
	}
	spin_unlock(&ctx->lock);
	if (report) {
		vmem_count(vmem_c_pressure_unanswered);
		pr_info_ratelimited("vmem: process %d holds %llu MiB of frames and does not answer requests for memory\n",
				    pid_nr(ctx->owner), ctx->frame_bytes >> 20);
	}
}

static unsigned long vmem_shrink_scan(struct shrinker *shrinker, struct shrink_control *sc)
{
	u64 all = atomic64_read(&vmem_counters[vmem_c_frame_bytes]);
	u64 want = (u64)sc->nr_to_scan << PAGE_SHIFT;
	struct vmem_ctx *ctx;

	if (!all)
		return SHRINK_STOP;
	spin_lock(&vmem_ctx_list_lock);
	list_for_each_entry(ctx, &vmem_ctx_list, link)
		vmem_ask(ctx, PAGE_ALIGN(mul_u64_u64_div_u64(want, READ_ONCE(ctx->frame_bytes), all)));
	spin_unlock(&vmem_ctx_list_lock);
	return SHRINK_STOP;
}

int vmem_pressure_init(void)
{
	vmem_shrinker = vmem_shrinker_new();
	if (!vmem_shrinker)
		return -ENOMEM;
	vmem_shrinker->count_objects = vmem_shrink_count;
	vmem_shrinker->scan_objects = vmem_shrink_scan;
	vmem_shrinker->seeks = DEFAULT_SEEKS;
	return vmem_shrinker_start(vmem_shrinker);
}

void vmem_pressure_exit(void)
{
	vmem_shrinker_stop(vmem_shrinker);
}
