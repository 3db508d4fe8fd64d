/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * vmem.h - what the files of vmem.ko share
 *
 * Lifetime rides on struct file: a context lives as long as its file, and each
 * mapping, each parked thread and each system call holds the file. A range lives
 * as long as its context names it, or a mapping, parked thread or call uses it.
 * Blocks and frames live in their range: a block until the range goes, a frame
 * until RELEASE.
 */
#ifndef VMEM_KMOD_VMEM_H
#define VMEM_KMOD_VMEM_H

#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/maple_tree.h>
#include <linux/mm.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <linux/xarray.h>

#include "../include/vmem/vmem_uapi.h"
#include "compat.h"

#define VMEM_UNIT_MIN		PAGE_SIZE
#define VMEM_UNIT_MAX		(32UL << 20)
#define VMEM_RANGE_MAX		(1ULL << 46)
#define VMEM_BATCH_MAX		1024U
#define VMEM_QUEUES		32	/* wait queues a context hashes its blocks to */

/* Longest sleep of a fault that holds mmap_lock, milliseconds. */
#define VMEM_HELD_WAIT_MS	20
/* How long one call waits, in all, for plain references on frames to go away. */
#define VMEM_PATIENCE_US	10000
/* How long an expired fault goes on giving SIGBUS before it is reported anew. */
#define VMEM_EXPIRED_MS		1000

enum vmem_block_state {
	VMEM_ABSENT,
	VMEM_PRESENT,
	VMEM_LEAVING,	/* REMOVE or DESTROY is taking it out: faults wait, unreported */
	VMEM_FAILED,
};

enum vmem_frame_state {
	VMEM_FREE,	/* the runtime's */
	VMEM_INSTALLED,	/* stands in frame->block */
	VMEM_MOVING,	/* RELEASE is taking it */
};

/*
 * struct vmem_ctx - one open file
 *
 * Lock order, outermost first. Never taken under any of them: mmap_lock, so no
 * copy to or from user memory, and no allocation that may sleep.
 *
 *	mmap_lock		(held by whoever faults)
 *	  page lock		of a frame's pieces, see trap.c
 *	    i_mmap_rwsem, mmu notifiers, page table locks: in unmap_mapping_range()
 *	    vmem_ctx_list_lock
 *	      ctx->lock
 *		wait queues, eventfd
 */
struct vmem_ctx {
	spinlock_t lock;
	struct inode *inode;		/* carries the mappings: its own, see context.c */
	struct pid *owner;		/* process that opened; constant */
	struct list_head link;		/* vmem_ctx_list_lock */
	struct maple_tree ranges;	/* page offset -> range; own lock */
	struct xarray pins;		/* id -> struct vmem_pinned; own lock */
	wait_queue_head_t event_wq;
	wait_queue_head_t fault_wq[VMEM_QUEUES];

	/* protected by lock */
	struct list_head events;	/* blocks with an event nobody read */
	struct eventfd_ctx *eventfd;
	pgoff_t next_pgoff;
	u64 frame_bytes;
	u64 installed_bytes;
	u64 pressure_bytes;		/* asked for, event not read */
	u64 asked_bytes;		/* asked for, not released */
	unsigned long asked_since;	/* jiffies */
	bool asked_reported;
	u32 knobs_seen;			/* vmem_knobs_seq that read(2) delivered */
	bool ready;			/* handshake done; only ever set */
	bool dead;			/* only ever set */

	atomic64_t pinned_bytes;
};

/* struct vmem_range - a pool or a region; constant but for @dead and @units */
struct vmem_range {
	struct kref ref;
	struct rcu_head rcu;
	struct vmem_ctx *ctx;
	u32 kind;
	bool longterm;
	bool dead;			/* ctx->lock; only ever set */
	unsigned int unit_shift;	/* log2 of pages in a block or frame */
	pgoff_t pgoff;
	unsigned long pages;
	struct xarray units;		/* index -> struct vmem_block or vmem_frame */
};

/* struct vmem_frame - the memory of one slot: 1 << (unit_shift - order) pieces */
struct vmem_frame {
	struct vmem_range *pool;
	unsigned long index;
	unsigned int order;		/* of each piece, constant */
	unsigned int pieces;		/* constant */

	/* protected by ctx->lock */
	enum vmem_frame_state state;
	bool suspect;			/* left a destroyed region with pins on it */
	struct vmem_block *block;	/* while INSTALLED */
	unsigned int base_pins;		/* pins when it was installed */

	struct page *piece[];
};

/* struct vmem_block - one block of a region that was ever touched or installed */
struct vmem_block {
	struct vmem_range *region;
	unsigned long index;

	/* protected by ctx->lock */
	enum vmem_block_state state;
	bool busy;		/* an operation works on it outside the lock */
	bool protect;		/* stores wait */
	bool dirty;
	bool touched;
	bool posted;		/* reported, and not answered */
	u32 answers;		/* counts answers; parked threads watch it */
	unsigned int held;	/* page references of threads parked in page_mkwrite */
	unsigned long deadline;	/* jiffies, while posted */
	struct vmem_frame *frame;	/* while PRESENT or LEAVING */
	struct list_head event;	/* in ctx->events, while posted and not read */
	u64 address;		/* of the fault that was posted */
	u32 thread;
	u32 fault_flags;
};

/* Every knob: its name here and in sysfs, lowest, highest and first value; 0 limits nothing. */
#define VMEM_KNOBS(X)								\
	X(frame_limit_bytes, 0, 1ULL << 50, 0)					\
	X(context_limit_bytes, 0, 1ULL << 50, 0)				\
	X(readahead_bytes, 0, 4ULL << 30, 64ULL << 20)				\
	X(fault_timeout_ms, 100, 3600000, 30000)				\
	X(watermark_low_percent, 0, 50, 5)					\
	X(watermark_high_percent, 0, 90, 10)					\
	X(frame_order, 0, PMD_SHIFT - PAGE_SHIFT, PMD_SHIFT - PAGE_SHIFT)	\
	X(trap_enabled, 0, 1, 1)

#define VMEM_KNOB_FIELD(name, low, high, first) u64 name;
struct vmem_knobs { VMEM_KNOBS(VMEM_KNOB_FIELD) };

/* Every counter: its name here and its file in sysfs. */
#define VMEM_COUNTERS(X)							\
	X(contexts) X(regions) X(frame_bytes) X(installed_bytes) X(pinned_bytes)	\
	X(scattered_frames) X(faults_read) X(faults_write) X(faults_protected)	\
	X(faults_remote) X(events) X(waits) X(timeouts) X(sigbus)		\
	X(refused_pinned) X(refused_limit) X(pressure_requests) X(pressure_unanswered)

#define VMEM_COUNTER_ID(name) vmem_c_##name,
enum vmem_counter { VMEM_COUNTERS(VMEM_COUNTER_ID) vmem_counters_end };

/* sysfs.c; knobs are read without a lock, each by READ_ONCE() */
extern struct vmem_knobs vmem_knobs;
extern atomic_t vmem_knobs_seq;
extern atomic64_t vmem_counters[vmem_counters_end];
extern atomic64_t vmem_node_bytes[MAX_NUMNODES];
extern const struct attribute_group *vmem_groups[];
int vmem_sysfs_init(void);
void vmem_sysfs_exit(void);

static inline void vmem_count(enum vmem_counter c)
{
	atomic64_inc(&vmem_counters[c]);
}

static inline void vmem_add(enum vmem_counter c, s64 n)
{
	atomic64_add(n, &vmem_counters[c]);
}

/* context.c */
extern const struct file_operations vmem_fops;
extern struct list_head vmem_ctx_list;
extern spinlock_t vmem_ctx_list_lock;
int vmem_context_init(void);
void vmem_context_exit(void);
void vmem_ctx_kill(struct vmem_ctx *ctx);
struct vmem_range *vmem_range_find(struct vmem_ctx *ctx, u64 offset, u32 kind);
void vmem_range_put(struct vmem_range *range);

static inline unsigned long vmem_unit_pages(const struct vmem_range *range)
{
	return 1UL << range->unit_shift;
}

static inline u64 vmem_unit_bytes(const struct vmem_range *range)
{
	return (u64)PAGE_SIZE << range->unit_shift;
}

static inline u64 vmem_unit_offset(const struct vmem_range *range, unsigned long index)
{
	return ((u64)range->pgoff + ((u64)index << range->unit_shift)) << PAGE_SHIFT;
}

/* frames.c */
extern const struct vm_operations_struct vmem_pool_vm_ops;
int vmem_populate(struct vmem_ctx *ctx, void *argument);
int vmem_release(struct vmem_ctx *ctx, void *argument);
void vmem_frame_free(struct vmem_frame *frame);
void vmem_frame_barrier(struct vmem_frame *frame);
bool vmem_frame_pinned(struct vmem_frame *frame, unsigned int base_pins,
		       const unsigned int *held, unsigned int *patience_us);
unsigned int vmem_frame_pins(struct vmem_frame *frame);
struct page *vmem_frame_page(struct vmem_frame *frame, unsigned long page);

/* trap.c, ops.c */
extern const struct vm_operations_struct vmem_region_vm_ops;
extern const struct vm_operations_struct vmem_longterm_vm_ops;
void vmem_vma_open(struct vm_area_struct *vma);
void vmem_vma_close(struct vm_area_struct *vma);
struct vmem_block *vmem_block_get(struct vmem_range *region, unsigned long index);
wait_queue_head_t *vmem_block_queue(struct vmem_block *block);
void vmem_block_kick(struct vmem_block *block);
void vmem_block_answer(struct vmem_block *block);
int vmem_batch(struct vmem_ctx *ctx, void *argument);
void vmem_region_empty(struct vmem_range *region);

/* events.c */
void vmem_post(struct vmem_block *block, unsigned long address, u32 thread, u32 flags);
void vmem_notify(struct vmem_ctx *ctx);
ssize_t vmem_read(struct file *file, char __user *buf, size_t size, loff_t *pos);
__poll_t vmem_poll(struct file *file, struct poll_table_struct *table);
int vmem_set_eventfd(struct vmem_ctx *ctx, void *argument);

/* pin.c */
int vmem_pin(struct vmem_ctx *ctx, void *argument);
int vmem_unpin(struct vmem_ctx *ctx, void *argument);
void vmem_unpin_all(struct vmem_ctx *ctx);

/* pressure.c */
int vmem_pressure_init(void);
void vmem_pressure_exit(void);

#endif /* VMEM_KMOD_VMEM_H */
