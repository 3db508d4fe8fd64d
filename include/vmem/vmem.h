/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libvmem: one address range over GPU memory, host memory and NVMe.
 *
 * Calls return 0 or a negative errno unless they say otherwise; vmem_last_error() has the message
 * of the calling thread's last failure. Every call is thread-safe. A forked child begins anew: see
 * vmem_init.
 *
 * Signals. No call may be made from a signal handler. A handler may access regions, and never runs
 * on a thread of the library. A signal that comes in a call is handled when the call ends or waits
 * for other threads, mostly within 50 ms. Its handler must return: if it leaves by longjmp, by an
 * exception or by the end of the thread, what the call has begun stays half done. A handler of a
 * signal that an access causes (SIGBUS) may jump. A thread that is cancelled in a call
 * (pthread_cancel, not asynchronous) ends after the call.
 *
 * Stack. A call takes at most 8 KiB of its caller's stack, so that threads of PTHREAD_STACK_MIN (16
 * KiB) and fibers may make it. If less than 128 KiB is left, the call runs on a stack of the
 * library, on the same thread, and so do the log sink and signal handlers that come meanwhile.
 * -ENOMEM: there is no memory for that stack.
 *
 * With a device tier on managed memory (setting `device`) libvmem has a SIGSEGV handler. It holds
 * accesses to blocks that move, and passes other faults on to the handler that it found. A thread
 * or a handler that accesses such regions must not have SIGSEGV blocked, nor in its sa_mask: the
 * access would end the process. A SIGSEGV handler that is installed later must call the one that it
 * found.
 *
 * Sizes and offsets are bytes. Locations are CUDA ordinals (0, 1, ..), VMEM_HOST or VMEM_SSD.
 * `stream` is a cudaStream_t passed as void *; NULL is the default stream (for vmem_prefetch no
 * stream). Host-only calls ignore it.
 *
 * Ranges. A range is any pointer and size inside one region. A call acts on every block that has a
 * byte of it. -EINVAL: a range outside regions, across two of them, or of size 0.
 */
#ifndef VMEM_VMEM_H
#define VMEM_VMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A call and the struct that it fills share a name, as with stat(). C++ names the struct `struct
 * vmem_stats`.
 */
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#endif

#define VMEM_VERSION_MAJOR 1
#define VMEM_VERSION_MINOR 0
#define VMEM_VERSION (VMEM_VERSION_MAJOR * 1000 + VMEM_VERSION_MINOR)

/* Locations */
#define VMEM_HOST (-1)
#define VMEM_SSD (-2)

/* Flags of vmem_create, vmem_alloc and vmem_map */
#define VMEM_HOST_ONLY 0x1u   /* no device tier, any block size */
#define VMEM_MAP_READ 0x10u   /* the library never writes the file and keeps no stores: see vmem_map */
#define VMEM_MAP_SHARED 0x20u /* changes reach the file */
#define VMEM_MAP_PRIVATE 0x40u /* changes stay in this region */
#define VMEM_NO_LOCK 0x100u    /* with VMEM_MAP_..: SHARED takes no lock; see vmem_map */
#define VMEM_FIXED 0x200u      /* vmem_create: `address` is in a reservation of the caller, which the region replaces */

/*
 * A block_size for regions whose use is not known: blocks of 64 KiB. A fault reads several of them
 * together, up to 1 MiB, as many as the blocks in memory beside it suggest. With a device tier the
 * setting device_block_size gives the size.
 */
#define VMEM_BLOCK_AUTO 1

/* Flags of vmem_export */
#define VMEM_EXPORT_DMA_BUF 0x1u

/* Access of a lease */
#define VMEM_READ 0x1u
#define VMEM_WRITE 0x2u

/*
 * Advice. The first six are those of cudaMemAdvise, for a location. The others concern the SSD tier
 * and ignore the location.
 */
enum vmem_advice {
	VMEM_ADVISE_SET_PREFERRED_LOCATION = 1, /* stays there while others leave; elsewhere it is evicted first */
	VMEM_ADVISE_UNSET_PREFERRED_LOCATION = 2,
	VMEM_ADVISE_SET_READ_MOSTLY = 3,        /* handles: CPU loads get a copy, which stays; a WRITE lease drops it */
	VMEM_ADVISE_UNSET_READ_MOSTLY = 4,
	VMEM_ADVISE_SET_ACCESSED_BY = 5,        /* managed: as in CUDA; handles: that device maps it too, over a link */
	VMEM_ADVISE_UNSET_ACCESSED_BY = 6,
	VMEM_ADVISE_NORMAL = 16,     /* undoes sequential, random, cold, hot, pin */
	VMEM_ADVISE_SEQUENTIAL = 17, /* whole region: reads far ahead, evicts behind */
	VMEM_ADVISE_RANDOM = 18,     /* whole region: no read-ahead */
	VMEM_ADVISE_WILL_NEED = 19,  /* as vmem_prefetch to the preferred location, else to VMEM_HOST */
	VMEM_ADVISE_DONT_NEED = 20,  /* drops the contents of blocks wholly inside: zeros, or the file's bytes; SHARED: see vmem_advise */
	VMEM_ADVISE_COLD = 21,       /* evicted first */
	VMEM_ADVISE_HOT = 22,        /* kept while anything else can be evicted */
	VMEM_ADVISE_PIN = 23,        /* evicted only when nothing else is left; no promise: a lease is one */
	VMEM_ADVISE_PRIORITY_LOW = 32,    /* whole region, relative to other regions */
	VMEM_ADVISE_PRIORITY_NORMAL = 33,
	VMEM_ADVISE_PRIORITY_HIGH = 34
};

/* Log levels */
#define VMEM_LOG_ERROR 0
#define VMEM_LOG_WARNING 1
#define VMEM_LOG_INFO 2
#define VMEM_LOG_DEBUG 3

struct vmem_range {
	const void *ptr;
	size_t size;       /* bytes */
	unsigned access;   /* VMEM_READ | VMEM_WRITE */
	unsigned reserved; /* 0 */
};

struct vmem_residency {
	uint64_t size; /* (in) sizeof(struct vmem_residency) */
	uint64_t zero_bytes, ssd_bytes, host_bytes, device_bytes; /* (out) bytes of the range in each tier */
	uint64_t block_size; /* (out) of its region: the unit that moves, and to which leases are rounded */
};

struct vmem_stats {
	uint64_t size;                        /* (in) sizeof(struct vmem_stats): the struct may grow */
	uint64_t faults;                      /* accesses that trapped */
	uint64_t fault_ns_total, fault_ns_max; /* from the report of a fault until the block is in place */
	uint64_t read_bytes, write_bytes;     /* from and to the SSD */
	uint64_t host_bytes, device_bytes, ssd_bytes; /* held now in each tier */
	uint64_t evictions;                   /* blocks that left host memory */
	uint64_t clean_drops;                 /* of evictions: without a write */
	uint64_t prefetched_blocks;           /* read, or moved to a device, before they were requested */
	uint64_t prefetch_hits;               /* of prefetched_blocks: used; assumed for those before a used one */
	uint64_t host_to_device_bytes, device_to_host_bytes;
	uint64_t io_errors, checksum_errors;
	uint64_t regions;
	uint64_t soft_faults;       /* faults served without I/O */
	uint64_t prefetch_wasted;   /* of prefetched_blocks: evicted without use */
	uint64_t host_budget;       /* in force, bytes */
	uint64_t copied_bytes;      /* bytes a CPU copied to put blocks in place */
	uint64_t lost_blocks;       /* blocks whose only copy was lost, since the start: see vmem_sync */
	uint64_t unknown_blocks;    /* blocks now whose last write failed: what the SSD has may be torn */
	uint64_t fault_around_blocks;  /* read with a requested block (VMEM_BLOCK_AUTO); their use is not observed */
	uint64_t dirty_bytes;       /* of blocks in host memory now that may have changes their shared file lacks */
	uint64_t background_write_bytes; /* of dirty blocks, written since the start without a request (setting writeback_interval) */
};

/* Backend of a region with a device tier: setting `device` */
#define VMEM_BACKEND_MANAGED 1u /* unified memory: the CPU reaches a block on a device where it is */
#define VMEM_BACKEND_HANDLES 2u /* physical handles: the device has page tables of its own */

struct vmem_device_stats {
	uint64_t size;                /* (in) sizeof(struct vmem_device_stats) */
	uint64_t budget, used_bytes;  /* device memory of libvmem; blocks that move between devices count on both */
	uint64_t leased_bytes;
	uint64_t in_bytes, out_bytes; /* moved to and from the device */
	uint64_t evictions, clean_drops;
	uint64_t driver_host_bytes;   /* host pages the driver holds for blocks of this device */
	uint64_t backend;             /* VMEM_BACKEND_*: how CPU and devices share a region, simulated or not */
	uint64_t guest_bytes;         /* of used_bytes: blocks for which another device had no room (setting peer_spill_percent) */
	uint64_t to_peers, from_peers; /* of out_bytes and in_bytes: blocks spilled to another device, and back from there */
};

/*
 * Returns the version of the running library, as VMEM_VERSION: it may be later than the header's.
 * Starts nothing. May be called anywhere, also in a forked child and in a signal handler.
 */
int vmem_version(void);

/*
 * Reads the environment, probes the kernel and starts the runtime's threads. Optional: the first
 * call that needs the runtime does it. -EINVAL: a bad environment variable; the message has its
 * name, its value and the accepted form. -EPERM or -ENOSYS: the kernel offers no way to trap
 * accesses; the message says how to enable one. -EMFILE, -ENFILE: no descriptor is free. -ENOTSUP:
 * the kernel's pages are not of 4 KiB, or valgrind runs the program.
 *
 * The library's threads have SCHED_OTHER, nice 0 and the default I/O priority, whatever the calling
 * thread has. They run on the CPUs that the main thread had when the library was loaded (setting
 * `cpus`). An ordinary user may not lower a nice value: the threads keep that of the first caller.
 * -EAGAIN: the calling thread has SCHED_DEADLINE, which cannot make threads.
 *
 * A child of fork() may make this call and any other. It makes regions of its own, with the
 * settings that its parent had. It does not inherit its parent's regions: calls for them, their
 * leases and kernels return -ECHILD. Their addresses stay without access, and an access gets
 * SIGSEGV; if the program does not handle that signal, a line on stderr says why first. A file or a
 * store that the parent holds is in use (-EBUSY). If the parent had a device tier the child has
 * none, because CUDA does not work after fork. With setting `device` auto it goes on without, with
 * a warning; any other value but none is -ENOTSUP. A child made by a raw system call, or by a
 * signal handler inside a call of libvmem, gets -ECHILD from every call until exec.
 */
int vmem_init(void);

/*
 * Frees every region, with live leases or without, and stops the threads, except the one that
 * delivers the log. Writes changed blocks of shared files first. Threads that access a region
 * afterwards get SIGBUS or SIGSEGV, until a new region, malloc() or mmap() uses the address again:
 * then they read and change its bytes. Calls that begin meanwhile wait until it is done, so it ends
 * however many threads make calls. Let streams that use regions end first: it waits for those of
 * SHARED regions, without limit, and frees other regions under their kernels.
 *
 * Exit. A program may end with regions, and with threads that access them: it may return from main,
 * or call exit() from any thread. All stores to shared files until then reach the files, also
 * stores by destructors of static objects, which may make any call. If a signal handler calls
 * exit() in the middle of a call, further calls on that thread fail with -EDEADLK. Changes may then
 * be lost, with a message, if the thread holds what is needed to write them.
 *
 * Exit ends even beside work that never does. It waits for streams until none has reached a release
 * for fault_timeout_ms. It waits as long for all the work of a device with a live lease for writing,
 * and 30 seconds for a disk or a device that does not answer. The log says what was not written.
 * While it waits for a device it writes the blocks that need none.
 *
 * A process that ends without exit() (SIGKILL, _exit, quick_exit, exec, abort, other signals) loses
 * stores to shared files that are younger than writeback_interval (5 s) plus the time that the disk
 * takes to write dirty_limit: see vmem_flush and vmem_flush_on. Stores to a plain mmap are in the
 * page cache, and none of these loses them.
 *
 * A program that has loaded this library by dlopen may dlclose it. The library's threads go on, so
 * it stays loaded, and so do the regions, as if it had not been closed.
 */
void vmem_shutdown(void);

/*
 * Sets or reads a setting (docs/settings.md). -ENOENT: unknown name. -EINVAL: bad value; the
 * message has the accepted form. -EBUSY: the setting cannot change while there are regions, or
 * host_budget is below what regions and leases need (the message has the numbers). -EPERM: publish,
 * in a program with more rights than the user who started it. -ENOMEM: device_budget is above what
 * a device has. -ERANGE (vmem_get): the value does not fit `size` bytes.
 *
 * Without regions, a setting that the runtime reads at its start ends the runtime. The next call
 * starts it anew, with counters of 0.
 */
int vmem_set(const char *name, const char *value);
int vmem_get(const char *name, char *value, size_t size);

/*
 * Delivers log lines to `sink` (NULL: stderr), in order, one at a time, and with no lock of the
 * library held. Lines that a call logged come on the thread that made it, mostly before it returns;
 * others come on a thread of the library.
 *
 * The sink may access regions, make any call, take its time, and call exit(). It must return: it
 * neither throws nor jumps. Lines that it logs itself are delivered after it has returned.
 *
 * A call that has logged runs the sink on its own thread before it returns, for lines of other
 * threads too: hold no lock that the sink takes while you make a call. Other calls do not wait for
 * the sink, except vmem_log. A fault waits for it, at most a second, if its access gets SIGBUS, and
 * so do others that the same thread serves.
 *
 * Lines that come while 256 KiB wait are dropped, and counted in a line. Of lines that may come for
 * each block one is logged a second, and the rest are counted.
 *
 * Lines from before this call still go to the old sink. When it returns no thread is inside the old
 * sink any more, unless a sink made the call: hold no lock that the old sink takes. The line that
 * says why an access gets SIGBUS is as a rule delivered before the signal, if the sink takes no
 * longer than a second. exit() delivers the lines that are left. If another thread is still in the
 * sink after a second, the rest goes to stderr. _exit() and signals may lose lines. A forked child
 * starts without a line and without a sink.
 */
void vmem_log(void (*sink)(int level, const char *line, void *user), void *user);

/*
 * Attributes of a new region. Set `size` to sizeof(struct vmem_region_attr), the rest to zero, and
 * then what is wanted. Zero stands for the setting's value of that moment, or for nothing. Later
 * versions add fields at the end: programs built with this header work with them, and get what zero
 * stands for.
 */
struct vmem_region_attr {
	size_t size;       /* of this struct */
	size_t block_size; /* a power of two from 4 KiB to 64 MiB, or VMEM_BLOCK_AUTO; see below */
	uint64_t offset;   /* in the file */
	const char *path;  /* the file, for the flags VMEM_MAP_..; NULL: `fd` is the file, 0 is stdin. Not both: with a path `fd` is 0 or less */
	const char *codec; /* of its blocks on the SSD: "none", "lz4", "zstd" */
	const char *name;  /* as vmem_name */
	int fd;            /* opened again with the flag's access; the caller may close it at once */
	int advice;        /* of enum vmem_advice, for the whole region: NORMAL to PRIORITY_HIGH except WILL_NEED, DONT_NEED; see below */
	int checksum;      /* of bytes that are read back from the SSD: 1 verify, -1 do not */
	unsigned flags;    /* VMEM_HOST_ONLY, VMEM_FIXED; with a file one of VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE, VMEM_NO_LOCK */
	/*
	 * Where the region is to be: a multiple of 2 MiB, and of block_size if given. A hint, as
	 * for mmap: no mapping is replaced, and *ptr may be elsewhere. With a device tier the
	 * region is where the driver has room.
	 *
	 * With VMEM_FIXED and VMEM_HOST_ONLY *ptr is `address`. The caller has reserved all of
	 * `size` there, rounded up to blocks, by private anonymous mappings without rights
	 * (PROT_NONE). The region replaces these and nothing else, and vmem_free puts them back.
	 * -EEXIST: something else is mapped there, or nothing. -EOPNOTSUPP: the module traps.
	 */
	void *address;
	/*
	 * Core dumps: -1 leaves the region's host memory out, 1 includes it, 0 is setting
	 * core_dump. If the module traps, dumps never include it, and 1 is -EOPNOTSUPP.
	 */
	int core_dump;
};

/*
 * Makes a region, as vmem_alloc, or with a flag VMEM_MAP_.. as vmem_map, with attributes of its
 * own. These do not depend on settings, which other parts of the program may change. attr NULL:
 * vmem_alloc(ptr, size, 0).
 *
 * If neither block_size nor the setting device_block_size gives the block size of a device tier on
 * physical handles, the advice SEQUENTIAL allows up to 32 MiB instead of 8, and RANDOM 2 MiB. No
 * advice changes that later.
 *
 * -EINVAL also: an attribute that is not accepted (the message has its value and what is accepted);
 * a file or an offset without a flag VMEM_MAP_..; a block_size below 2 MiB for a region with a
 * device tier, or above it if that is on managed memory. -E2BIG: a larger struct than this library
 * knows, with something in the rest.
 */
int vmem_create(void **ptr, size_t size, const struct vmem_region_attr *attr);

/*
 * Makes a region of zeros, of at least `size` bytes, aligned to 2 MiB. It takes tables, and no
 * memory yet. flags: 0 or VMEM_HOST_ONLY. mlockall() does not keep blocks in memory: they are paged
 * all the same (a lease keeps them). With MCL_CURRENT it reads every block of every region once,
 * and fills empty frames beyond the budget.
 *
 * -EINVAL: size 0 or too large, unknown flags. -ENOMEM: no memory, addresses or mappings, or a
 * budget below 4 blocks.
 */
int vmem_alloc(void **ptr, size_t size, unsigned flags);

/*
 * Makes a region of the bytes of a file or block device from `offset` on (a multiple of 4 KiB).
 * flags: exactly one of VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE, | VMEM_HOST_ONLY,
 * | VMEM_NO_LOCK. The file may be closed, renamed or unlinked afterwards. A region has one
 * descriptor; SHARED regions of one file share one. POSIX locks (fcntl) of this process on the file
 * stay when a region goes, unless a thread takes one at that moment.
 *
 * READ: do not store into the region. No store is refused, but it reaches no file and is gone,
 * without a message, when its block leaves memory: after vmem_evict or DONT_NEED, or as soon as
 * another block needs the memory. The file's bytes are seen then. PRIVATE keeps stores.
 *
 * SHARED locks the file exclusively (flock) for the region's life. This process may have other,
 * disjoint ranges of the file in other SHARED regions. With VMEM_NO_LOCK the region takes no lock
 * and ignores those of others, for a program that holds one itself. No other process may write these
 * bytes then.
 *
 * The region may be longer than the file, and the file may become shorter and longer, as with mmap.
 * Accesses inside the file are right. An access beyond its last page gets SIGBUS, with the reason in
 * the log, and is right when the file has grown (with the module after an acquire or DONT_NEED).
 * Write-back never makes the file longer. When the file becomes shorter, blocks in memory stay as
 * they are until they leave it.
 *
 * Files that could not be served right later are refused; vmem_last_error() has the reason and the
 * remedy:
 * -EPERM: SHARED of a file that is sealed against writing (F_SEAL_WRITE, F_SEAL_FUTURE_WRITE),
 *   immutable, append-only, or under fs-verity. While the region lives F_SEAL_WRITE gets EBUSY.
 * -ETXTBSY: SHARED of an active swap file, or of a running program.
 * -EINVAL: not a regular file or block device; a file of a pseudo file system (sysfs, proc, cgroup,
 *   ..), or one that has other bytes than its size says; SHARED of huge pages (hugetlbfs); a block
 *   device, or a file that is sealed against growing, shorter than offset + size; a bad argument.
 * -EBUSY: another process has it SHARED; this process holds a lock of it (flock); a process has held
 *   a lease on it (F_SETLEASE) for a second; a mounted block device; another SHARED region has some
 *   of these bytes (READ and PRIVATE regions of them may see old ones).
 * -EISDIR, -ENOENT, -EACCES, -EROFS, -EMFILE, and others: from opening the file.
 *
 * For a file that refuses changes later see vmem_discard.
 */
int vmem_map(void **ptr, size_t size, const char *path, uint64_t offset, unsigned flags);

/*
 * Frees a region; `ptr` is what the call that made it returned (NULL: does nothing, returns 0).
 * Waits for I/O under way, and without limit for streams that have not reached a release of this
 * region. Writes changed blocks of a shared file first; if that fails the region stays and the
 * error is returned (vmem_discard ends it all the same). -EINVAL: no runtime, after vmem_shutdown.
 * -EBUSY: live leases. -EIO: blocks of a shared file are lost (vmem_sync) and no call has said so
 * yet; the region stays, and the next call frees it. -EPERM: a part is sealed (mseal) and cannot be
 * unmapped; the region stays as it was, and vmem_evict gives its memory back. Threads that fault in
 * the region meanwhile get SIGBUS.
 *
 * Other regions use its memory. Memory that no region has taken within a second goes back to the
 * system, as does all memory that the library holds and does not use.
 *
 * Pins. From Linux 6.8 on, and with the module, a pinned page (O_DIRECT, io_uring and its
 * registered buffers, RDMA, process_vm_writev) stays where it is until the pin ends, whatever is
 * evicted, synced or dropped. Three cases need a VMEM_HOST lease: older kernels; references that
 * are not pins (vmsplice, MSG_ZEROCOPY, io_uring's SEND_ZC of a buffer that is not registered,
 * stores through /proc/PID/mem); and pages whose rights the program has changed (mprotect). Without
 * the lease stores may be lost, and the reader of the pipe, or the receiver, may get bytes of
 * another block. A SHARED region with a pinned page is not freed: -EBUSY, after a second. In any
 * other region that is freed the page lives on, without an address, until its pin ends.
 *
 * Buffers of io_uring also need a VMEM_HOST lease (with VMEM_WRITE for a read), unless their ring has
 * IORING_SETUP_DEFER_TASKRUN: the kernel may copy on the submitting thread while it is in a call of
 * this library, and the process hangs if the copy has to wait for a block then.
 */
int vmem_free(void *ptr);

/*
 * Frees a region as vmem_free does, whatever its file says. It is for a region whose file refuses
 * changes by now: the file was sealed, made immutable or read-only, became a swap file, or its disk
 * is full or fails. Until then such changes keep their part of host_budget, and writing them is
 * tried again. The call first writes what the file takes, as vmem_free does. The rest is lost with
 * the region: -EIO, with the numbers, and the region is gone. After any other error, such as -EBUSY
 * for live leases, the region stays.
 */
int vmem_discard(void *ptr);

/* Names a region for messages and statistics; keeps at most 63 bytes. */
int vmem_name(const void *ptr, const char *name);

/*
 * Starts to move the range toward `location`, and returns at once. A hint: it takes effect when
 * `stream` reaches it, as cudaMemPrefetchAsync does, or a few milliseconds later; with `stream`
 * NULL, or for a region without a device tier, now. If the stream's launch queue is full, the call
 * returns when there is room again. Work on the stream is not ordered after the move. The hint may
 * be dropped when memory is short, or when 1024 hints wait for their streams. -ENODEV: no such
 * device. -EINVAL also: the stream is of no device that has been used. -EBUSY: it captures a graph.
 */
int vmem_prefetch(const void *ptr, size_t size, int location, void *stream);

/*
 * Tells how a range will be used. `advice` is of enum vmem_advice.
 *
 * DONT_NEED waits for I/O on its blocks, and for streams as vmem_free does. It skips leased and
 * pinned blocks, and returns -EBUSY after the rest. In a SHARED region it writes changes first;
 * then the blocks leave memory. It drops changes that the file refuses for good (sealed, immutable,
 * read-only, ..), and changes that the file refuses again after an earlier write failed; the first
 * failure (-ENOSPC, -EDQUOT, -EIO) is returned, and the changes stay. -EIO once, with the numbers,
 * when changes were dropped; the file's bytes are seen then.
 *
 * -ENOSPC also: a region keeps cold, hot and pin of 256 ranges, and locations of 256. NORMAL and
 * UNSET always work, except in the middle of a larger range. Read-mostly blocks on physical handles
 * stay on the device when the CPU loads them: kernels and copies that store to them need a WRITE
 * lease, or their stores are lost.
 */
int vmem_advise(const void *ptr, size_t size, int advice, int location);

/*
 * Leases the range to `stream` (VMEM_HOST: to the CPU and DMA) for VMEM_READ, VMEM_WRITE or both:
 * its blocks come to `location` and stay until the matching vmem_release. Leases are counted: each
 * acquire needs its own release.
 *
 * Waits, without limit, for disk, for copies between tiers, and for streams that have not reached a
 * vmem_release, if that lease holds the range at another location or holds room that this one
 * needs. Never waits for other work of a GPU.
 *
 * On error nothing is leased. -ENOMEM: the range and the live leases exceed the budget, which the
 * message names. -EBUSY: a live lease at another location, or the stream captures a graph. -EACCES:
 * WRITE of a READ region. -EIO: a block could not be read. -ENOSPC, -EIO: nothing leaves memory,
 * because writes fail (the next vmem_sync does not repeat that failure).
 */
int vmem_acquire(const void *ptr, size_t size, unsigned access, int location, void *stream);
/*
 * Ends a lease when the stream reaches this point. -EINVAL: the range holds a block that this
 * stream has not leased; nothing is released then. -EBUSY: the stream captures a graph; the lease
 * stays. A lease at VMEM_HOST belongs to no stream: any `stream` releases it.
 *
 * Waits, as a launch does, while the stream's launch queue is full; other threads are not held up.
 * On a destroyed stream it waits until the device has done all its work. It cannot do so while any
 * stream captures a graph (that capture fails): -EBUSY, and the lease stays.
 */
int vmem_release(const void *ptr, size_t size, void *stream);
/*
 * Leases or releases many ranges, of one or several regions, all or nothing. If a release gets
 * -ENOMEM (no memory to mark a stream), leases at other locations may have ended.
 */
int vmem_acquire_ranges(const struct vmem_range *ranges, size_t count, int location, void *stream);
int vmem_release_ranges(const struct vmem_range *ranges, size_t count, void *stream);

/*
 * Leases ranges, as vmem_acquire_ranges, and returns the lease as a handle. Ending the handle
 * releases exactly these ranges. The array is copied. Waits as vmem_acquire does. Do not release
 * ranges of a handle by vmem_release.
 */
struct vmem_lease;
int vmem_lease(struct vmem_lease **lease, const struct vmem_range *ranges, size_t count, int location, void *stream);
/*
 * Begins a lease and returns at once. The lease is ready, or has failed, when vmem_lease_poll says
 * so, when vmem_lease_fd's descriptor is readable, or when `ready` (NULL: none) is called. `ready`
 * is called once per lease, perhaps before this call returns, with 0 or the negative errno that
 * vmem_lease would have returned; vmem_last_error() has its message there.
 *
 * Until the lease is ready nothing is known of the blocks. From then on it is in the stream's
 * order: work that is put on the stream afterwards finds them. The stream must live until the lease
 * is ended. This call decides which stream the default stream is. A lease that waits delays no
 * other lease. A lease that is not ready yet holds its regions, as a live one: vmem_free returns
 * -EBUSY.
 *
 * `ready` runs on a thread of the library, with no lock held and every signal blocked except those
 * that its own instructions cause. It may access regions, make any call, end its own lease and
 * others, and take its time; it neither throws nor jumps. vmem_lease_end and vmem_shutdown wait
 * until it has returned: hold no lock that it takes while you call them. Inside a `ready` they wait
 * for no other `ready`. exit() and a forked child wait for none: leases that are not ready then may
 * never be.
 *
 * On error there is no lease, and no call of `ready`. -EINVAL: a bad argument, or a stream that is
 * another one on each thread (cudaStreamPerThread). -EAGAIN: 64 leases are not ready or in their
 * `ready`, or no thread can be made. -ENOMEM.
 */
int vmem_lease_async(struct vmem_lease **lease, const struct vmem_range *ranges, size_t count, int location,
                     void *stream, void (*ready)(struct vmem_lease *lease, int result, void *user), void *user);
/*
 * Tells the state of a lease. 0: ready. -EAGAIN: not yet. Any other errno: it has failed, for that
 * reason, and nothing is leased. -ECANCELED: it was cancelled, or vmem_shutdown has freed its
 * regions. A failed lease must be ended too.
 */
int vmem_lease_poll(struct vmem_lease *lease);
/*
 * Returns a descriptor that polls readable once the lease is ready or has failed, for event loops
 * (0 or more). The lease owns it and closes it at its end: neither read nor close it. -EMFILE,
 * -ENFILE: no descriptor is left.
 */
int vmem_lease_fd(struct vmem_lease *lease);
/*
 * Ends a lease when `stream` reaches this point, and frees the handle. The stream is the lease's,
 * or another one of the same device whose work comes after the last use; at VMEM_HOST any. A lease
 * that is not ready is cancelled: its `ready` has been called when this returns, as a rule with
 * -ECANCELED, and nothing is leased; this waits for I/O under way. NULL: does nothing, returns 0.
 * After vmem_shutdown it frees the handle and returns 0. A later lease may get the same address: end
 * each handle once.
 *
 * -EBUSY: the stream captures a graph. -EINVAL: not a lease, not a stream of its device, or
 * vmem_release has been used on its blocks. The lease stays then.
 */
int vmem_lease_end(struct vmem_lease *lease, void *stream);

/*
 * The view of an open range that a kernel gets, by value. <vmem/device.cuh> makes a
 * vmem::device_region of it. Its contents are private.
 */
struct vmem_kernel_view {
	uint64_t words[16];
};
/*
 * Opens a range to kernels of a device that find out while they run which blocks they need. A
 * kernel requests a block by <vmem/device.cuh>, waits until it is there, and gives it up. Meanwhile
 * a thread of the library pages it in, and others out. Kernels that get *view, on any stream of the
 * device, may request blocks from here on.
 *
 * The program needs no lease, and leases at the device are not in the way. The library itself
 * leases what kernels have requested, at most `budget` bytes at once (0: half of device_budget);
 * blocks that leave count as leased until the device has reached that point. A group of threads can
 * hold no more than that at once.
 *
 * access: VMEM_READ, or VMEM_READ | VMEM_WRITE. Blocks that kernels have written to are written
 * back when they leave the device. To other calls the blocks are leased at the device, with that
 * access: vmem_free of the region returns -EBUSY, kernels cannot get a block that is leased
 * elsewhere, and a block that has come cannot be leased elsewhere. One range may be open more than
 * once. As under any lease, a CPU access waits for a block that has come with VMEM_WRITE, and gets
 * SIGBUS after fault_timeout_ms. If the range is open for reading only, kernels see what the CPU
 * stores to a block only when it has left the device and come again. Close a range before the CPU
 * works on it.
 *
 * If a block cannot be brought, the kernels that request it get an error, and the log has the
 * reason; half a second later they may request it again. Kernels end their waits by themselves, in
 * the device's time, when nothing makes progress (vmem/device.cuh), after a fork, and when the
 * process exits.
 *
 * Load kernels before you open a range. CUDA loads a kernel at its first launch, may wait for
 * running kernels, and stops every other CUDA call of the process meanwhile, also the library's. A
 * first launch beside kernels that wait for blocks lasts until these give up. So set
 * CUDA_MODULE_LOADING=EAGER in the environment, launch each kernel once before, or call
 * cudaFuncGetAttributes for it. cudaFree does the same harm, because it waits for every kernel of
 * the device; cudaFreeAsync does not.
 *
 * -ENODEV, -EINVAL, -EACCES: as vmem_acquire. -ENOMEM: `budget` is above device_budget. -EAGAIN: no
 * thread can be made. -ECANCELED: vmem_shutdown or exit() came meanwhile. -EOPNOTSUPP: the device
 * tier is on managed memory (set `device` to handles), or this device cannot do it.
 */
struct vmem_kernel;
int vmem_kernel_begin(struct vmem_kernel **kernel, const void *ptr, size_t size, unsigned access, int device,
                      size_t budget, struct vmem_kernel_view *view);
/*
 * Closes a range to kernels when `stream` reaches this point, and frees the handle. Every kernel
 * that was given the view must be on the stream, or ordered before its work. Waits for these
 * kernels, without limit, and serves their requests meanwhile. A kernel that is put on a stream
 * later accesses memory that the range no longer owns. NULL for the handle: does nothing, returns
 * 0. vmem_shutdown ends waits of kernels first and then waits for the kernels; the handle must be
 * given to this call all the same, which frees it.
 *
 * -EBUSY: the stream captures a graph. -EINVAL: not an open range, or not a stream of its device.
 * -ECANCELED: exit() came, and half a second later kernels run on. The range stays open then.
 */
int vmem_kernel_end(struct vmem_kernel *kernel, void *stream);

/*
 * Exports the memory of leased blocks at a device, as a descriptor in *fd that the caller closes
 * (close on exec). With flags 0 it is a handle of the one block that has the range, for
 * cuMemImportFromShareableHandle in another process (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR). It
 * has block_size bytes (vmem_query), from an address that is a multiple of it. With
 * VMEM_EXPORT_DMA_BUF it is a dma-buf of all blocks that have a byte of the range, for another
 * driver, such as that of a network card. The call waits for copies under way; the caller waits for
 * work on streams.
 *
 * Each block of the range must be under a live lease at one device, which must last as long as
 * another process or driver uses the memory. Their stores count only under a lease for writing, and
 * only the caller can order them with streams: release the lease when they are done. When the lease
 * has ended and the block leaves the device, the descriptor and what was made of it keep the
 * memory, with its bytes, until they are closed. The memory never backs another block. Until then
 * the device has less memory than device_budget counts. So export blocks that stay, not each block
 * for each use: exported memory is not kept for the next block, which then takes longer.
 *
 * -EINVAL: a block of the range is not leased so, or *fd would be of several blocks. -EBUSY: the
 * CPU stored to one of them under a READ lease. -EOPNOTSUPP: a region without a device tier, or on
 * managed memory, or the device or its driver cannot do it. -EIO: the device is lost, or its driver
 * has refused.
 */
int vmem_export(const void *ptr, size_t size, unsigned flags, int *fd);

/*
 * Moves the range's blocks out to `location` (VMEM_HOST or VMEM_SSD) and returns when it is done.
 * Waits for streams as vmem_free does. Skips leased blocks. -EBUSY: a page of a block is pinned,
 * and the block stays in memory; the other blocks have left. -ENOSPC, -EFBIG, -EIO: the first write
 * that failed; its block stays in memory. -EIO: blocks are lost, see vmem_sync.
 */
int vmem_evict(const void *ptr, size_t size, int location);

/*
 * Writes changed blocks of the range back. Returns when stores made before the call (and by
 * released leases) have a copy on the SSD: of a shared file a durable one, as with fsync; of
 * anonymous memory one that does not outlive the process. Waits for streams as vmem_free does.
 * -EBUSY: blocks under a live WRITE lease were skipped, the rest is synced. -ENOSPC, -EFBIG (the
 * limit of `ulimit -f`, for a shared file), -EIO: a write failed, now or in the background since
 * the last call.
 *
 * Lost blocks. -EIO also while blocks of the range are lost: a device that had their only copy was
 * lost, a move of their pages stopped half way, or their stored bytes cannot be read back. The
 * message names the first; the rest of the range is synced. Accesses to a lost block get SIGBUS and
 * an acquire -EIO, never older bytes. It stays lost until vmem_free, or until
 * VMEM_ADVISE_DONT_NEED, after which it is zeros, or what the file has (a shared file's too). An
 * acquire or an access reads a block again that could not be read.
 *
 * vmem_sync(NULL, 0) syncs every region that exists when the call begins. It tries all and returns
 * the first error, -EBUSY only if there is no other. Without regions it returns 0 and starts
 * nothing.
 */
int vmem_sync(const void *ptr, size_t size);

/*
 * Writes changed blocks of every shared file, also those under live leases, as exit() does, and
 * returns when the files have them: they outlive the process, but not the machine (vmem_sync). Call
 * it before a process ends without exit(), by _exit, exec or quick_exit. It waits for devices with
 * a live lease for writing, for at most fault_timeout_ms in which none makes progress, and for
 * disks without limit. It logs what was not written, and returns the first failure: -ENOSPC,
 * -EFBIG, -EIO, -ETIMEDOUT. Without regions it returns 0 and starts nothing. Not for signal
 * handlers.
 */
int vmem_flush(void);

/*
 * Has shared files written when one of these `count` signals comes to the process, as by exit(),
 * and then takes the signal's default action. A thread of the library does it, while the program's
 * threads go on. Writing ends after 30 s without progress. The same signal again ends the process
 * at once. SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU and SIGPWR are
 * accepted. A signal that is ignored stays ignored, and one for which sigaction() is called later
 * is the program's. In a forked child they have their default action. Process 1 of a container,
 * where the kernel takes no default action, ends by _exit(128 + the signal).
 *
 * -EINVAL: another signal, or none. -EBUSY: the program has a handler for it, which can have a
 * thread call vmem_flush or exit(); nothing has changed then. -EAGAIN, -ENOMEM: no thread.
 */
int vmem_flush_on(const int *signals, size_t count);

/*
 * Counts the bytes of the range in each tier at this moment. A block on its way to a device counts
 * as host memory until its copy is issued, because a CPU access before that may call it back. The
 * caller sets out->size.
 */
int vmem_query(const void *ptr, size_t size, struct vmem_residency *out);
/*
 * Reads counters since the runtime started: see vmem_set and vmem_shutdown. The caller sets
 * out->size, so that a program and a library of different versions fit: vmem_stats, vmem_query and
 * vmem_device_stats write the fields that both have, and nothing beyond out->size. -EINVAL:
 * out->size is less than what these calls need at least (16 bytes; vmem_query: 40), or above 4096.
 */
int vmem_stats(struct vmem_stats *out);
/* Reads the counters of a device. -ENODEV: no such device. */
int vmem_device_stats(int device, struct vmem_device_stats *out);

/* Returns a fixed string that says what an errno, negative or positive, means. Never NULL. */
const char *vmem_strerror(int err);
/*
 * Returns the message of the calling thread's last failure; "" if none. Valid until the thread's
 * next libvmem call.
 */
const char *vmem_last_error(void);

#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#ifdef __cplusplus
}
#endif
#endif /* VMEM_VMEM_H */
