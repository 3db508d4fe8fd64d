/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * vmem.h - shared by the files of vmem.ko; visibility and lifetimes: docs/kernel-module.md
 * Each object is complete before it can be found. A decision about it is made under one lock, and
 * read under that lock: of two calls that race the later one sees the decision of the earlier.
 */
#ifndef VMEM_KMOD_VMEM_H
#define VMEM_KMOD_VMEM_H

#include <linux/device.h>
#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/maple_tree.h>
#include <linux/mutex.h>
#include <linux/pagemap.h>
#include <linux/pid.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include "../include/vmem/vmem_uapi.h"
#include "compat.h"

/* Points where calls race: test builds (make VMEM_DELAY=y) sleep here now and then. */
#ifdef VMEM_DELAY
void vmem_point(void);
#else
static inline void vmem_point(void) { }
#endif
#define vmem_lock(ctx)	do { vmem_point(); spin_lock(&(ctx)->lock); } while (0)
#define vmem_unlock(ctx) do { spin_unlock(&(ctx)->lock); vmem_point(); } while (0)

#define VMEM_UNIT_MIN		PAGE_SIZE
#define VMEM_UNIT_MAX		(32UL << 20)
#define VMEM_RANGE_MAX		BIT_ULL(46)
#define VMEM_BATCH_MAX		1024U
#define VMEM_BATCH_FEW		8U	/* so many need no allocation */
#define VMEM_CTX_RECORDS	16	/* counted for an open file */
#define VMEM_QUEUES		32	/* wait queues a context hashes its blocks to */
#define VMEM_HELD_WAIT_MS	4	/* longest sleep of a fault that holds mmap_lock */
#define VMEM_HELD_LOOKS		50	/* so many sleeps, and a second, while a writer waits */
#define VMEM_PATIENCE_US	10000	/* per call, for plain references on frames to go */
#define VMEM_FREEZE_LOOK	(HZ / 2)	/* how often a waiting system call looks */
#define VMEM_EXPIRED		HZ	/* so long after the deadline SIGBUS; then reported anew */
/* Memory for calls: never the OOM killer, since the caller may be the one that can free frames. */
#define VMEM_CALL_GFP	(GFP_KERNEL_ACCOUNT | __GFP_RETRY_MAYFAIL | __GFP_NOWARN)

/* LEAVING: REMOVE takes the block out; faults wait, unreported. */
enum vmem_block_state { VMEM_ABSENT, VMEM_PRESENT, VMEM_LEAVING, VMEM_FAILED };

/* FREE: of the runtime. INSTALLED: in a block. MOVING: POPULATE or RELEASE works on it. */
enum vmem_frame_state { VMEM_FREE, VMEM_INSTALLED, VMEM_MOVING };

/* struct vmem_user - totals of all contexts and left frames of one user: see vmem_payer() */
struct vmem_user {
	struct list_head link;		/* vmem_ctx_list_lock */
	refcount_t ref;			/* 0 under vmem_ctx_list_lock: gone */
	kuid_t uid;
	atomic64_t frame_bytes;
	atomic64_t records;		/* blocks, ranges, and VMEM_CTX_RECORDS per context */
	atomic_long_t pinned;		/* pages under RLIMIT_MEMLOCK */
};

/*
 * struct vmem_ctx - one open file
 * Lock order: docs/kernel-module.md. mmap_lock is never taken under these locks: no copy to or from
 * user memory, and no allocation that may sleep.
 */
struct vmem_ctx {
	spinlock_t lock;		/* see above */
	struct inode *inode;		/* carries the mappings; one per context, see context.c */
	struct pid *owner;		/* process that opened the file; constant */
	struct vmem_user *user;		/* user who opened the file; constant */
	bool unlimited;			/* may exceed the limits of a user; constant */
	struct list_head link;		/* vmem_ctx_list_lock */
	struct maple_tree ranges;	/* page offset -> range; own lock */
	struct xarray pins;		/* id -> struct vmem_pinned; own lock */
	wait_queue_head_t event_wq;
	wait_queue_head_t fault_wq[VMEM_QUEUES];

	/* protected by lock */
	struct list_head events;	/* blocks with an unread event */
	struct eventfd_ctx *eventfd;
	pgoff_t next_pgoff;
	u64 frame_bytes, installed_bytes;
	u64 pressure_bytes, asked_bytes; /* requested: event unread; unreleased, vmem_asked() */
	unsigned long asked_at, answered_at;	/* jiffies: halved; last release or first request */
	bool asked_reported;
	int knobs_seen;			/* vmem_knobs_seq that read(2) has returned */
	bool ready, dead, kernel_faults; /* only ever set: handshake; end; system calls may wait */

	atomic64_t pinned_bytes;
};

/* struct vmem_range - a pool or a region; constant but for @dead and @units */
struct vmem_range {
	struct kref ref;
	struct rcu_head rcu;
	struct vmem_ctx *ctx;
	u32 kind;
	bool longterm, dead;		/* dead: ctx->lock; only ever set */
	unsigned int unit_shift;	/* log2 of pages in a block or frame */
	pgoff_t pgoff;
	unsigned long pages;
	struct xarray units;		/* index -> struct vmem_block or vmem_frame */
};

/* struct vmem_frame - the memory of one slot: 1 << (unit_shift - order) pieces */
struct vmem_frame {
	struct list_head link;		/* in vmem_frames; in vmem_left if unowned but in use */
	struct vmem_ctx *ctx;		/* constant, valid while in vmem_frames */
	struct vmem_user *user;		/* the user charged, while in vmem_left */
	u64 offset;			/* in the file, constant */
	unsigned int order, pieces;	/* of each piece; number of pieces; constant */
	struct page **piece;

	/* protected by ctx->lock */
	enum vmem_frame_state state;
	bool suspect;			/* left a destroyed region, may be in use */
	unsigned int base_pins;		/* pins at INSTALL, or fewer seen at a fault since */
};

/* struct vmem_block - one block of a region that is present, failed, or waited for */
struct vmem_block {
	struct vmem_range *region;
	u64 offset;			/* in the file, constant */

	/* protected by ctx->lock */
	enum vmem_block_state state;
	bool busy;		/* an operation works on it outside the lock */
	unsigned int users;	/* uses of a pointer to it outside the lock */
	u32 flags;		/* VMEM_STATE_*: DIRTY, PROTECTED, TOUCHED, WAITED (reported) */
	u32 answers;		/* number of answers; parked threads watch it */
	unsigned long deadline;	/* jiffies, while WAITED */
	struct vmem_frame *frame;	/* while PRESENT or LEAVING */
	struct list_head event;	/* in ctx->events, while WAITED and unread */
	struct vmem_event report;	/* while WAITED */
};

/* Knobs, then counters: each has a file of its name in sysfs (sysfs.c, docs/kernel-module.md). */
enum vmem_value {
	vmem_frame_limit_bytes, vmem_context_limit_bytes, vmem_readahead_bytes,
	vmem_fault_timeout_ms, vmem_watermark_low_percent, vmem_watermark_high_percent,
	vmem_frame_order, vmem_trap_enabled, vmem_user_limit_bytes, vmem_user_limit_records,
	vmem_pressure_percent, vmem_contexts, vmem_regions, vmem_frame_bytes, vmem_installed_bytes,
	vmem_pinned_bytes, vmem_scattered_frames, vmem_faults_read, vmem_faults_write,
	vmem_faults_protected, vmem_faults_remote, vmem_events, vmem_waits, vmem_timeouts,
	vmem_sigbus, vmem_refused_pinned, vmem_refused_limit, vmem_pressure_requests,
	vmem_pressure_unanswered, vmem_broken_bytes, vmem_left_bytes, vmem_records, vmem_values_end
};

struct vmem_file {
	struct device_attribute attr;
	atomic64_t value;
	u64 min, max;		/* of a knob */
	char name[24];		/* of a memory node */
};

extern struct vmem_file vmem_files[vmem_values_end];
extern struct vmem_file *vmem_node_files;	/* frame bytes on each memory node */
extern atomic_t vmem_knobs_seq;			/* number of changes of knobs */
extern const struct attribute_group *vmem_groups[];
int vmem_sysfs_init(void);
void vmem_sysfs_exit(void);

static inline s64 vmem_get(enum vmem_value v)
{
	return atomic64_read(&vmem_files[v].value);
}

static inline void vmem_add(enum vmem_value v, s64 n)
{
	atomic64_add(n, &vmem_files[v].value);
}

/* context.c */
extern struct list_head vmem_ctx_list;
extern struct mutex vmem_ctx_list_lock;
struct vmem_range *vmem_range_find(struct vmem_ctx *ctx, u64 offset, u32 kind);
struct vmem_range *vmem_units_find(struct vmem_ctx *ctx, u64 offset, u32 kind, u32 count,
				   unsigned long *index);
void vmem_range_put(struct vmem_range *range);
bool vmem_record(struct vmem_ctx *ctx, int n);
void vmem_user_put(struct vmem_user *user);

static inline u64 vmem_unit_bytes(const struct vmem_range *range)
{
	return (u64)PAGE_SIZE << range->unit_shift;
}

/* Offset in the file of the range's block or frame @index. */
static inline u64 vmem_unit_offset(const struct vmem_range *range, unsigned long index)
{
	return ((u64)range->pgoff << PAGE_SHIFT) + index * vmem_unit_bytes(range);
}

/* frames.c */
extern struct kmem_cache *vmem_frame_cache;
int vmem_populate(struct vmem_ctx *ctx, void *argument);
int vmem_release(struct vmem_ctx *ctx, void *argument);
void vmem_frame_free(struct vmem_range *pool, struct vmem_frame *frame);
void vmem_frames_end(void);
bool vmem_frame_held(struct vmem_frame *frame, bool wait);
void vmem_frame_barrier(struct vmem_frame *frame);
bool vmem_frame_pinned(struct vmem_frame *frame, unsigned int base_pins, unsigned int *patience_us);
unsigned int vmem_frame_pins(struct vmem_frame *frame);
bool vmem_frame_broken(const struct vmem_frame *frame);
int vmem_pin(struct vmem_ctx *ctx, void *argument);
int vmem_unpin(struct vmem_ctx *ctx, void *argument);
void vmem_unpin_all(struct vmem_ctx *ctx);

/* trap.c, ops.c */
extern const struct vm_operations_struct vmem_vm_ops, vmem_watched_vm_ops;
extern struct workqueue_struct *vmem_line_wq;
struct vmem_block *vmem_block_get(struct vmem_range *region, unsigned long index, gfp_t gfp);
void vmem_block_put(struct vmem_block *block);
wait_queue_head_t *vmem_block_queue(struct vmem_block *block);
void vmem_block_kick(struct vmem_block *block);
void vmem_block_answer(struct vmem_block *block);
int vmem_batch(struct vmem_ctx *ctx, void *argument);
void vmem_region_empty(struct vmem_range *region);

/* events.c */
void vmem_notify(struct vmem_ctx *ctx);
ssize_t vmem_read(struct file *file, char __user *buf, size_t size, loff_t *pos);
__poll_t vmem_poll(struct file *file, struct poll_table_struct *table);
int vmem_set_eventfd(struct vmem_ctx *ctx, void *argument);
u64 vmem_asked(struct vmem_ctx *ctx);
extern struct list_lru vmem_frames;		/* by the memory cgroup that pays, and node */
extern struct wait_queue_head vmem_given;	/* frames were given back */
extern struct shrinker vmem_shrinker_model;

#endif /* VMEM_KMOD_VMEM_H */
