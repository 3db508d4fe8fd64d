/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note OR Apache-2.0 */
/*
 * vmem_uapi.h - the interface of /dev/vmem; docs/kernel-module.md explains it
 *
 * One open file is one context; everything that a context holds ends with it. Inside a
 * context everything has one name: its byte offset in the file, the same offset
 * that mmap(2) takes. VMEM_IOC_CREATE returns ranges of offsets, of two kinds:
 *
 *   pool    slots of host memory ("frames"), mapped by the runtime for I/O
 *   region  blocks that the application accesses; an absent block traps
 *
 * Offsets are never reused, so a stale mapping never shows something new.
 *
 * Every struct is fixed-width, explicitly padded, 8-byte aligned and the same for
 * 32- and 64-bit callers. Structs grow at the end: one longer than the module
 * knows must be zero beyond the part that it knows (-E2BIG); one shorter than the first
 * version is -EMSGSIZE. Unknown flags and non-zero padding are -EINVAL.
 *
 * Any call: -EPROTO before the handshake, -ESHUTDOWN on a dead context, -ENOTTY unknown call,
 * -EFAULT argument not readable or writable, -ENOMEM. Calls that name an offset: -ENXIO nothing
 * there, -EINVAL not the start of a unit or a count of 0, -ERANGE the range has fewer units.
 * open(2): -EACCES not for reading and writing, -EDQUOT, -ENOMEM. mmap(2): -EPROTO, -ESHUTDOWN,
 * -EINVAL private, -ENXIO not inside one range.
 */
#ifndef VMEM_VMEM_UAPI_H
#define VMEM_VMEM_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define VMEM_UAPI_VERSION	1
#define VMEM_DEVICE_NAME	"vmem"

/* Feature bits: branch on these after the handshake, never on the version. */
#define VMEM_FEATURE_TRAP	(1ULL << 0)	/* regions may be created */
#define VMEM_FEATURE_PROTECT	(1ULL << 1)	/* VMEM_OP_PROTECT, _WATCH; exact dirty marks */
#define VMEM_FEATURE_EVENTFD	(1ULL << 2)
#define VMEM_FEATURE_PIN	(1ULL << 3)
#define VMEM_FEATURE_PRESSURE	(1ULL << 4)	/* VMEM_EVENT_PRESSURE */
#define VMEM_FEATURE_KNOBS	(1ULL << 5)	/* VMEM_EVENT_KNOBS */
#define VMEM_FEATURE_HUGE	(1ULL << 6)	/* aligned 2 MiB frames map as one entry */
/*
 * System calls, pins and accesses from another process wait for an absent block; without it
 * they get -EFAULT. Offered to CAP_SYS_PTRACE, or to all by the parameter kernel_faults,
 * because such a wait can hold a lock that other threads need. In force after a HELLO that
 * has it in @need.
 */
#define VMEM_FEATURE_KERNEL_FAULTS	(1ULL << 7)

/**
 * struct vmem_hello - handshake; every other call before it returns -EPROTO
 * @version:	(in) VMEM_UAPI_VERSION; (out) the module's, also with -EPROTONOSUPPORT
 * @event_size:	(out) bytes of one struct vmem_event from read(2)
 * @need:	(in) feature bits that the caller requires: -EOPNOTSUPP
 * @features:	(out) feature bits of the module
 * @unit_min:	(out) smallest block and frame, bytes
 * @unit_max:	(out) largest block and frame, bytes
 * @batch_max:	(out) most operations in one VMEM_IOC_BATCH
 * @pad:	0
 */
struct vmem_hello {
	__u32 version;
	__u32 event_size;
	__u64 need;
	__u64 features;
	__u32 unit_min;
	__u32 unit_max;
	__u32 batch_max;
	__u32 pad;
};

#define VMEM_KIND_POOL		1
#define VMEM_KIND_REGION	2

/*
 * Region: the application may pin the region's own pages for long (RDMA, io_uring
 * fixed buffers). Stores are then not watched: every touched block is reported
 * dirty, and PROTECT and WATCH return -EOPNOTSUPP. Without the flag Linux 6.4
 * and later refuse long-term pins for writing.
 */
#define VMEM_CREATE_LONGTERM	(1U << 0)

/**
 * struct vmem_create - makes a range of offsets; takes no memory yet
 * @kind:	(in) VMEM_KIND_*
 * @flags:	(in) VMEM_CREATE_*
 * @size:	(in) bytes, a multiple of @unit, at most 2^46
 * @unit:	(in) bytes of a block or frame: a power of two, unit_min..unit_max
 * @pad:	0
 * @offset:	(out) first offset, a multiple of 2 MiB and of @unit
 *
 * -EPERM: a region while the knob trap_enabled is 0; -EDQUOT: limit of the user's records;
 * -ENOSPC: no offsets are left.
 */
struct vmem_create {
	__u32 kind;
	__u32 flags;
	__u64 size;
	__u32 unit;
	__u32 pad;
	__u64 offset;
};

/**
 * struct vmem_destroy - ends a range
 * @offset:	(in) from VMEM_IOC_CREATE
 *
 * A region: threads parked in it, and accesses from now on, get SIGBUS. Its frames
 * go back to their pools; pinned ones are unusable until the pins are gone. A pool:
 * -EBUSY while a slot is populated.
 */
struct vmem_destroy {
	__u64 offset;
};

#define VMEM_POPULATE_STRICT	(1U << 0)	/* this node or -ENOMEM */

/**
 * struct vmem_populate - gives zeroed memory to empty slots of a pool
 * @offset:	(in) first slot
 * @count:	(in) slots
 * @node:	(in) NUMA node, or -1 for the caller's
 * @flags:	(in) VMEM_POPULATE_*
 * @done:	(out) slots populated, also on error; the rest is unchanged
 * @scattered:	(out) slots of @done made of smaller pages than requested
 * @pad:	0
 *
 * -EEXIST: slot has memory; -EDQUOT: limit of machine, user or context; -ENODEV: no such node, or
 * one without memory; -EINTR: the caller was killed.
 */
struct vmem_populate {
	__u64 offset;
	__u32 count;
	__s32 node;
	__u32 flags;
	__u32 done;
	__u32 scattered;
	__u32 pad;
};

/**
 * struct vmem_release - frees the memory of slots
 * @offset:	(in) first slot
 * @count:	(in) slots
 * @done:	(out) slots released, also on error
 *
 * -ENOENT: empty slot; -EBUSY: installed, or pinned; -EINPROGRESS: another call is giving or
 * taking its memory; -EINTR: the caller was killed.
 */
struct vmem_release {
	__u64 offset;
	__u32 count;
	__u32 done;
};

/* Operations on one block each. A refused one changes nothing. */
#define VMEM_OP_INSTALL		1	/* absent or failed -> present, with @frame */
#define VMEM_OP_REMOVE		2	/* present -> absent; the frame is the caller's again */
#define VMEM_OP_PROTECT		3	/* present: after the return a store waits and is reported */
#define VMEM_OP_UNPROTECT	4	/* present: stores go on */
#define VMEM_OP_WATCH		5	/* present: clears and rearms the dirty mark; stores do not wait */
#define VMEM_OP_FAIL		6	/* absent -> failed: accesses get SIGBUS */
#define VMEM_OP_UNFAIL		7	/* failed -> absent */
#define VMEM_OP_WAKE		8	/* parked threads retry and are reported again */
#define VMEM_OP_QUERY		9	/* fills @state and @frame */

#define VMEM_OPF_PROTECT	(1U << 0)	/* INSTALL: and PROTECT, without a window between */
#define VMEM_OPF_CLEAN		(1U << 1)	/* PROTECT: also clear the dirty mark */

#define VMEM_STATE_PRESENT	(1U << 0)
#define VMEM_STATE_FAILED	(1U << 1)
#define VMEM_STATE_DIRTY	(1U << 2)	/* perhaps stored to since INSTALL, or the last clearing */
#define VMEM_STATE_PROTECTED	(1U << 3)
#define VMEM_STATE_TOUCHED	(1U << 4)	/* faulted in since INSTALL */
#define VMEM_STATE_WAITED	(1U << 5)	/* a fault was reported and not yet answered */

/**
 * struct vmem_op - one operation
 * @op:		(in) VMEM_OP_*
 * @flags:	(in) VMEM_OPF_*
 * @block:	(in) offset of the block
 * @frame:	(in) INSTALL: offset of the frame; (out) REMOVE, QUERY: the block's frame
 * @result:	(out) 0 or a negative errno
 * @state:	(out) VMEM_STATE_* before the operation
 *
 * -ENXIO: no such block or frame; -EINVAL: unaligned, or frame and block differ in size;
 * -EHWPOISON: the frame's memory failed; -EDQUOT: no more blocks may be present or failed;
 * -EEXIST: block present; -ENOENT: block absent, frame empty; -EADDRINUSE: frame installed;
 * -EBUSY: the frame is pinned; -EINPROGRESS: another call, or an earlier operation of this
 * batch, is moving this block or frame; -EALREADY: failed already; -ENODATA: not failed;
 * -ENOMEM: no memory for the record of one more block; -ESHUTDOWN: the region was destroyed
 * meanwhile.
 */
struct vmem_op {
	__u32 op;
	__u32 flags;
	__u64 block;
	__u64 frame;
	__s32 result;
	__u32 state;
};

/**
 * struct vmem_batch - operations on different blocks
 * @ops:	(in) address of struct vmem_op[@count]
 * @count:	(in) 1..batch_max
 * @flags:	0
 * @done:	(out) operations whose result is 0
 * @pad:	0
 *
 * Fails as a whole only for a bad argument or lack of memory, before it does anything; up to
 * eight operations need no memory. Exception: -EFAULT if @ops cannot be written back. If the
 * caller is killed, the remaining operations are refused.
 */
struct vmem_batch {
	__u64 ops;
	__u32 count;
	__u32 flags;
	__u32 done;
	__u32 pad;
};

/**
 * struct vmem_eventfd - signals an eventfd when there are events; -1 removes it
 * @fd:		(in) an eventfd
 * @pad:	0
 *
 * -EBADF: not open; -EINVAL: not an eventfd.
 */
struct vmem_eventfd {
	__s32 fd;
	__u32 pad;
};

#define VMEM_PIN_WRITE		(1U << 0)	/* also for stores */

/**
 * struct vmem_pin - long-term pin of the caller's own memory, until UNPIN or close
 * @address:	(in) any, page-aligned
 * @size:	(in) bytes, whole pages, at most 1 GiB
 * @flags:	(in) VMEM_PIN_*
 * @id:		(out) for VMEM_IOC_UNPIN
 * @runs:	(out) physically contiguous runs the buffer consists of
 * @pad:	0
 *
 * Charged to RLIMIT_MEMLOCK (-ENOMEM) unless CAP_IPC_LOCK, for the caller's user and for the
 * context's. -EFAULT: unmapped, or not writable; -ERANGE: beyond the address space; -EINTR: the
 * caller was killed.
 */
struct vmem_pin {
	__u64 address;
	__u64 size;
	__u32 flags;
	__u32 id;
	__u32 runs;
	__u32 pad;
};

/**
 * struct vmem_unpin - ends a pin
 * @id:		(in) from VMEM_IOC_PIN, else -ENOENT
 * @pad:	0
 */
struct vmem_unpin {
	__u32 id;
	__u32 pad;
};

/**
 * struct vmem_info - knobs in force, and what this context holds
 * @frame_limit:	(out) machine-wide, bytes, 0 none
 * @context_limit:	(out) bytes, 0 none
 * @frame_bytes:	(out) of this context
 * @installed_bytes:	(out) part of @frame_bytes that is in regions
 * @pinned_bytes:	(out) by VMEM_IOC_PIN
 * @asked_bytes:	(out) requested by PRESSURE and not released; halved every five seconds
 * @readahead_bytes:	(out) knob
 * @fault_timeout_ms:	(out) knob
 * @watermark_low:	(out) knob, percent of the limit that should be free
 * @watermark_high:	(out) knob, percent
 * @frame_order:	(out) knob: largest order of one physically contiguous piece
 */
struct vmem_info {
	__u64 frame_limit;
	__u64 context_limit;
	__u64 frame_bytes;
	__u64 installed_bytes;
	__u64 pinned_bytes;
	__u64 asked_bytes;
	__u64 readahead_bytes;
	__u32 fault_timeout_ms;
	__u32 watermark_low;
	__u32 watermark_high;
	__u32 frame_order;
};

#define VMEM_EVENT_FAULT	1	/* a thread waits for @offset */
#define VMEM_EVENT_PRESSURE	2	/* memory is short: release frames, @bytes of them */
#define VMEM_EVENT_KNOBS	3	/* a knob changed: VMEM_IOC_INFO */

#define VMEM_FAULT_WRITE	(1U << 0)	/* a store */
#define VMEM_FAULT_PROTECTED	(1U << 1)	/* a store to a present, protected block */
#define VMEM_FAULT_REMOTE	(1U << 2)	/* not an access of the thread itself: GPU, pin, ptrace */

/**
 * struct vmem_event - from read(2), as many as fit; blocks unless O_NONBLOCK
 * @type:	VMEM_EVENT_*
 * @flags:	FAULT: VMEM_FAULT_* of the first thread
 * @offset:	FAULT: of the block
 * @address:	FAULT: accessed virtual address, rounded down to a page
 * @bytes:	PRESSURE: bytes requested; else 0
 * @thread:	FAULT: thread id in the opener's pid namespace, 0 unknown
 * @pad:	0
 *
 * One event per block, however many threads wait, until INSTALL, FAIL, UNPROTECT or
 * WAKE answers it or the fault timeout passes. read(2): -EINVAL for a buffer smaller than
 * one event, -ESHUTDOWN on a dead context.
 */
struct vmem_event {
	__u32 type;
	__u32 flags;
	__u64 offset;
	__u64 address;
	__u64 bytes;
	__u32 thread;
	__u32 pad;
};

#define VMEM_IOC_MAGIC		0xF5
#define VMEM_IOC_HELLO		_IOWR(VMEM_IOC_MAGIC, 0, struct vmem_hello)
#define VMEM_IOC_CREATE		_IOWR(VMEM_IOC_MAGIC, 1, struct vmem_create)
#define VMEM_IOC_DESTROY	_IOW(VMEM_IOC_MAGIC, 2, struct vmem_destroy)
#define VMEM_IOC_POPULATE	_IOWR(VMEM_IOC_MAGIC, 3, struct vmem_populate)
#define VMEM_IOC_RELEASE	_IOWR(VMEM_IOC_MAGIC, 4, struct vmem_release)
#define VMEM_IOC_BATCH		_IOWR(VMEM_IOC_MAGIC, 5, struct vmem_batch)
#define VMEM_IOC_EVENTFD	_IOW(VMEM_IOC_MAGIC, 6, struct vmem_eventfd)
#define VMEM_IOC_PIN		_IOWR(VMEM_IOC_MAGIC, 7, struct vmem_pin)
#define VMEM_IOC_UNPIN		_IOW(VMEM_IOC_MAGIC, 8, struct vmem_unpin)
#define VMEM_IOC_INFO		_IOR(VMEM_IOC_MAGIC, 9, struct vmem_info)
/* Ends the context: every parked thread gets SIGBUS, later calls get -ESHUTDOWN. */
#define VMEM_IOC_SHUTDOWN	_IO(VMEM_IOC_MAGIC, 10)

#endif /* VMEM_VMEM_UAPI_H */
