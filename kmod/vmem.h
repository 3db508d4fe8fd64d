/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * vmem.h - what the files of vmem.ko share; who may see what, until when: docs/kernel-module.md
 * Each object is complete before it can be found; what is decided about it is decided under one
 * lock, where the decision is also looked at: of two calls that race the later sees the earlier's.
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

/* Where a race would be won: test builds (make VMEM_DELAY=y) sleep here, now and then. */
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
#define VMEM_BATCH_FEW		8U	/* so many need no memory of their own */
#define VMEM_CTX_RECORDS	16	/* an open file weighs as much */
#define VMEM_QUEUES		32	/* wait queues a context hashes its blocks to */
#define VMEM_HELD_WAIT_MS	4	/* longest sleep of a fault that holds mmap_lock */
#define VMEM_HELD_LOOKS		50	/* so many, and a second, while somebody wants to write */
#define VMEM_PATIENCE_US	10000	/* a call's, in all, for plain references on frames to go */
#define VMEM_FREEZE_LOOK	(HZ / 2)	/* so often a system call that waits looks */
#define VMEM_EXPIRED		HZ	/* so long a late fault gets SIGBUS; then it is news */
/* A call's memory: never the OOM killer. Who could give frames back may be the one that calls. */
#define VMEM_CALL_GFP	(GFP_KERNEL_ACCOUNT | __GFP_RETRY_MAYFAIL | __GFP_NOWARN)

/* LEAVING: REMOVE is taking it out, faults wait, unreported. */
enum vmem_block_state { VMEM_ABSENT, VMEM_PRESENT, VMEM_LEAVING, VMEM_FAILED };

/* FREE: the runtime's. INSTALLED: in a block. MOVING: POPULATE gives, RELEASE takes it: theirs. */
enum vmem_frame_state { VMEM_FREE, VMEM_INSTALLED, VMEM_MOVING };

/* struct vmem_user - what all contexts and left frames of one user hold: see vmem_payer() */
struct vmem_user {
	struct list_head link;		/* vmem_ctx_list_lock */
	refcount_t ref;			/* 0 under vmem_ctx_list_lock: gone */
	kuid_t uid;
	atomic64_t frame_bytes;
	atomic64_t records;		/* blocks, ranges and VMEM_CTX_RECORDS a context */
	atomic_long_t pinned;		/* pages, where RLIMIT_MEMLOCK holds */
};

/*
 * struct vmem_ctx - one open file
 * Lock order: docs/kernel-module.md. Under none of those locks is mmap_lock
 * taken, so no copy to or from user memory, nor memory allocated that may sleep.
 */
struct vmem_ctx {
	spinlock_t lock;		/* see above */
	struct inode *inode;		/* carries the mappings: its own, see context.c */
	struct pid *owner;		/* process that opened; constant */
	struct vmem_user *user;		/* who opened; constant */
	bool unlimited;			/* may exceed the limits of a user; constant */
	struct list_head link;		/* vmem_ctx_list_lock */
	struct maple_tree ranges;	/* page offset -> range; own lock */
	struct xarray pins;		/* id -> struct vmem_pinned; own lock */
	wait_queue_head_t event_wq;
	wait_queue_head_t fault_wq[VMEM_QUEUES];

	/* protected by lock */
	struct list_head events;	/* blocks with an event nobody read */
	struct eventfd_ctx *eventfd;
	pgoff_t next_pgoff;
	u64 frame_bytes, installed_bytes;
	u64 pressure_bytes, asked_bytes; /* asked for: event not read; not released, vmem_asked() */
	unsigned long asked_at, answered_at;	/* jiffies: halved; last release, or first asking */
	bool asked_reported;
	int knobs_seen;			/* vmem_knobs_seq that read(2) delivered */
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
	struct list_head link;		/* vmem_frames; vmem_left once it is nobody's, but in use */
	struct vmem_ctx *ctx;		/* constant, valid while in vmem_frames */
	struct vmem_user *user;		/* who is charged, once it is in vmem_left */
	u64 offset;			/* in the file, constant */
	unsigned int order, pieces;	/* of each piece; how many; constant */
	struct page **piece;

	/* protected by ctx->lock */
	enum vmem_frame_state state;
	bool suspect;			/* left a destroyed region, perhaps in use */
	unsigned int base_pins;		/* pins at INSTALL, or fewer seen at a fault since */
};

/* struct vmem_block - one block of a region that is present, failed, or waited for */
struct vmem_block {
	struct vmem_range *region;
	u64 offset;			/* in the file, constant */

	/* protected by ctx->lock */
	enum vmem_block_state state;
	bool busy;		/* an operation works on it outside the lock */
	unsigned int users;	/* who follow a pointer to it outside the lock */
	u32 flags;		/* VMEM_STATE_*: DIRTY, PROTECTED, TOUCHED, WAITED (reported) */
	u32 answers;		/* counts answers; parked threads watch it */
	unsigned long deadline;	/* jiffies, while WAITED */
	struct vmem_frame *frame;	/* while PRESENT or LEAVING */
	struct list_head event;	/* in ctx->events, while WAITED and not read */
	struct vmem_event report;	/* while WAITED */
};

/* Knobs, then counters: each a file of its name in sysfs (sysfs.c, docs/kernel-module.md). */
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
	char name[24];		/* of a memory node's file */
};

extern struct vmem_file vmem_files[vmem_values_end];
extern struct vmem_file *vmem_node_files;	/* frame bytes on each memory node */
extern atomic_t vmem_knobs_seq;			/* counts changes of knobs */
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

/* In the file, of the range's block or frame number @index. */
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
extern struct list_lru vmem_frames;		/* by who pays: memory cgroup and node */
extern struct wait_queue_head vmem_given;	/* some were given back */
extern struct shrinker vmem_shrinker_model;

#endif /* VMEM_KMOD_VMEM_H */
