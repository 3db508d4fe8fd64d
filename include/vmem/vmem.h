/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libvmem: one address range over GPU memory, host memory and NVMe.
 *
 * Calls return 0 or a negative errno unless they say otherwise; vmem_last_error() has the message
 * of the calling thread's last failure. Every call is thread-safe. No call may be made from a
 * signal handler. A forked child begins anew: vmem_init. A signal handler may access
 * regions, and never runs on a thread of the library; one that comes in a call runs when that ends,
 * or waits for others, mostly within 50 ms. There it has to return: by longjmp, an exception or the
 * end of the thread what the call has begun would stay half done. Out of an access (SIGBUS) it may
 * jump. A thread that is cancelled in a call (pthread_cancel, not asynchronous) ends after it.
 *
 * Stack: a call takes at most 8 KiB of its caller's, so that threads of PTHREAD_STACK_MIN (16 KiB)
 * and fibers may make it. Where less than 128 KiB is left, the call runs on a stack of the library's,
 * on the same thread, and so do the log sink and signal handlers that come meanwhile; -ENOMEM if
 * there is no memory for one.
 *
 * With a device tier on managed memory (setting `device`) libvmem has a SIGSEGV handler, which holds
 * accesses of blocks that move and passes the rest on to the handler it found. A thread or a handler
 * that accesses such regions must not have SIGSEGV blocked, nor in its sa_mask: the access would end
 * the process. A SIGSEGV handler that is installed later has to call the one it found.
 *
 * Sizes and offsets are bytes. Locations are CUDA ordinals (0, 1, ..), VMEM_HOST or VMEM_SSD.
 * `stream` is a cudaStream_t passed as void *, NULL the default stream (vmem_prefetch: none);
 * host-only calls ignore it.
 *
 * Ranges: any pointer and size inside one region; a call acts on every block that has a byte of it.
 * A range outside regions, across two of them, or of size 0: -EINVAL.
 */
#ifndef VMEM_VMEM_H
#define VMEM_VMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A call and the struct it fills share a name, as stat() does; C++ reaches the struct as
 * `struct vmem_stats`.
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
#define VMEM_MAP_READ 0x10u   /* the file is never written; a stray store stays in memory */
#define VMEM_MAP_SHARED 0x20u /* changes reach the file */
#define VMEM_MAP_PRIVATE 0x40u /* changes stay in this region */
#define VMEM_NO_LOCK 0x100u    /* with VMEM_MAP_..: SHARED takes no lock; see vmem_map */
#define VMEM_FIXED 0x200u      /* vmem_create: `address` lies in a reservation of the caller's, which gives way */

/*
 * As block_size, where nobody knows how a region will be used: blocks of 64 KiB, of which a fault
 * reads as many together as those in memory beside it speak for, up to 1 MiB. With a device tier as
 * the setting device_block_size says.
 */
#define VMEM_BLOCK_AUTO 1

/* Flags of vmem_export */
#define VMEM_EXPORT_DMA_BUF 0x1u

/* Access of a lease */
#define VMEM_READ 0x1u
#define VMEM_WRITE 0x2u

/*
 * Advice. The first six are cudaMemAdvise's, for a location; the others concern the SSD tier and
 * ignore it.
 */
enum vmem_advice {
	VMEM_ADVISE_SET_PREFERRED_LOCATION = 1, /* stays there while others leave; first to leave other devices */
	VMEM_ADVISE_UNSET_PREFERRED_LOCATION = 2,
	VMEM_ADVISE_SET_READ_MOSTLY = 3,        /* CPU loads take a copy (handles), which stays; a WRITE lease drops it */
	VMEM_ADVISE_UNSET_READ_MOSTLY = 4,
	VMEM_ADVISE_SET_ACCESSED_BY = 5,        /* managed: CUDA's; handles: mapped for that device too, over a link */
	VMEM_ADVISE_UNSET_ACCESSED_BY = 6,
	VMEM_ADVISE_NORMAL = 16,     /* undo sequential, random, cold, hot, pin */
	VMEM_ADVISE_SEQUENTIAL = 17, /* whole region: read far ahead, evict behind */
	VMEM_ADVISE_RANDOM = 18,     /* whole region: no read-ahead */
	VMEM_ADVISE_WILL_NEED = 19,  /* as vmem_prefetch to where it is preferred, else to VMEM_HOST */
	VMEM_ADVISE_DONT_NEED = 20,  /* drop the contents of blocks wholly inside: zeros, or the file's bytes; SHARED: see vmem_advise */
	VMEM_ADVISE_COLD = 21,       /* evict first */
	VMEM_ADVISE_HOT = 22,        /* keep while anything else can go */
	VMEM_ADVISE_PIN = 23,        /* evict only when nothing else is left; no promise: a lease is one */
	VMEM_ADVISE_PRIORITY_LOW = 32,    /* whole region, against other regions */
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
	uint64_t block_size; /* (out) of its region: what moves as one, and what a lease is rounded to */
};

struct vmem_stats {
	uint64_t size;                        /* (in) sizeof(struct vmem_stats): the struct may grow */
	uint64_t faults;                      /* accesses that trapped */
	uint64_t fault_ns_total, fault_ns_max; /* from the report of a fault to the block being in place */
	uint64_t read_bytes, write_bytes;     /* from and to the SSD */
	uint64_t host_bytes, device_bytes, ssd_bytes; /* held now in each tier */
	uint64_t evictions;                   /* blocks that left host memory */
	uint64_t clean_drops;                 /* .. of them without a write */
	uint64_t prefetched_blocks;           /* read, or moved to a device, before they were asked for */
	uint64_t prefetch_hits;               /* .. of them used; presumed for those before one that was */
	uint64_t host_to_device_bytes, device_to_host_bytes;
	uint64_t io_errors, checksum_errors;
	uint64_t regions;
	uint64_t soft_faults;       /* faults served without I/O */
	uint64_t prefetch_wasted;   /* .. of prefetched_blocks, evicted without use */
	uint64_t host_budget;       /* in force, bytes */
	uint64_t copied_bytes;      /* bytes a CPU copied to put blocks in place */
	uint64_t lost_blocks;       /* blocks whose only copy was lost, since the start: vmem_sync */
	uint64_t unknown_blocks;    /* blocks now whose last write failed: what the SSD has may be torn */
	uint64_t fault_around_blocks;  /* read with one that was asked for (VMEM_BLOCK_AUTO): whether they are used is not seen */
	uint64_t dirty_bytes;       /* blocks in host memory now that may hold what their shared file lacks */
	uint64_t background_write_bytes; /* .. written since the start while nobody asked for it (setting writeback_interval) */
};

/* What a region with a device tier stands on: setting `device` */
#define VMEM_BACKEND_MANAGED 1u /* unified memory: the CPU reaches a block on a device where it is */
#define VMEM_BACKEND_HANDLES 2u /* physical handles: the device has page tables of its own */

struct vmem_device_stats {
	uint64_t size;                /* (in) sizeof(struct vmem_device_stats) */
	uint64_t budget, used_bytes;  /* device memory of libvmem; what moves between devices counts on both */
	uint64_t leased_bytes;
	uint64_t in_bytes, out_bytes; /* moved to and from the device */
	uint64_t evictions, clean_drops;
	uint64_t driver_host_bytes;   /* host pages the driver holds for blocks of this device */
	uint64_t backend;             /* VMEM_BACKEND_*: how CPU and devices share a region, simulated or not */
	uint64_t guest_bytes;         /* of used_bytes: blocks for which another device had no room (setting peer_spill_percent) */
	uint64_t to_peers, from_peers; /* of out_bytes and in_bytes: to such a place on another device, and from there */
};

/*
 * The version of the library that runs, as VMEM_VERSION: it may be later than the header's. Starts
 * nothing, and may be called anywhere: also in a forked child, and in a signal handler.
 */
int vmem_version(void);

/*
 * Reads the environment, probes the kernel and starts the runtime's threads. Optional: the first
 * call that needs the runtime does it. -EINVAL names a bad environment variable, its value and the
 * accepted form; -EPERM or -ENOSYS when the kernel offers no way to trap accesses, with how to
 * enable one; -ENOTSUP where the kernel's pages are not of 4 KiB, or valgrind runs the program.
 *
 * The threads have SCHED_OTHER, nice 0, the default I/O priority and the CPUs that the main thread had
 * when the library was loaded (setting `cpus`), whatever the calling thread has, as far as the user
 * may: an ordinary user's stay at the nice value of whoever calls first. From a thread with
 * SCHED_DEADLINE, which can make no threads: -EAGAIN.
 *
 * A child of fork() may call this, or any other call, and makes regions of its own, with the settings
 * that its parent had. Its parent's regions are not inherited: calls about them, their leases and
 * kernels answer -ECHILD, their addresses stay without access, and an access gets SIGSEGV, after a
 * line on stderr that says why where the program handles that signal nowhere. A file or a store that
 * its parent holds is in use (-EBUSY). Where its parent had a device tier it has none, since CUDA does
 * not work after fork: setting `device` auto goes on without, with a warning, and any other value but
 * none is -ENOTSUP. A child made by a raw system call, or by a signal handler inside a call of
 * libvmem, answers -ECHILD to every call until exec.
 */
int vmem_init(void);

/*
 * Frees every region, live leases or not (changed blocks of shared files are written first), and
 * stops the threads, all but the one that delivers the log. Threads that access a region afterwards
 * get SIGBUS or SIGSEGV. Calls that begin meanwhile wait until it is done, so it ends however many
 * threads call. Let streams that use regions end first: it waits for those of SHARED regions,
 * without limit, and frees others under their kernels.
 *
 * A program may end with regions and with threads that access them: return from main, exit() from
 * any thread. What was stored to shared files by then reaches them, also what destructors of static
 * objects store, which may make any call. After exit() from inside a call (by a signal handler in
 * the middle of one) calls on that thread fail with -EDEADLK, and changes may be lost, with a
 * message, where the thread holds what is needed to write them. Exit ends also beside what never
 * does: it waits for streams at most fault_timeout_ms in which none comes to a release, as long for
 * all the work of a device with a live lease for writing, and 30 seconds for a disk or a device
 * that does not answer, and says what was not written. Beside a device it writes what needs none.
 * A process that ends without exit() (SIGKILL, _exit, quick_exit, exec, abort, other signals) loses
 * what was stored to shared files within writeback_interval (5 s) before its end, and what
 * dirty_limit takes to write: see vmem_flush and vmem_flush_on. Stores of a plain mmap are in the
 * page cache, and lost by none of these.
 *
 * A program that has this library by dlopen may dlclose it: its threads go on, so it stays where it
 * is, and so do the regions, as if it had not been closed.
 */
void vmem_shutdown(void);

/*
 * Sets or reads a setting (docs/settings.md). -ENOENT unknown name; -EINVAL bad value, with the
 * accepted form; -EBUSY when the setting cannot change while there are regions, or host_budget is
 * below what regions and leases need (the message has the numbers); -EPERM for publish in a program
 * with more rights than who started it; -ENOMEM: device_budget is above what a device has. Without
 * regions a setting that the runtime reads at its start ends it, for the next call to start anew,
 * with counters of 0. vmem_get: -ERANGE when the value does not fit `size` bytes.
 */
int vmem_set(const char *name, const char *value);
int vmem_get(const char *name, char *value, size_t size);

/*
 * Delivers log lines to `sink` (NULL: stderr), in order, one at a time, and with no lock of the
 * library held: lines that a call logged on the thread that made it, mostly before it returns,
 * others on a thread of the library. The sink may access regions, make any call, take its time, and
 * call exit(). A call that logged runs the sink on its own thread before it returns, for lines of
 * other threads too: hold no lock that the sink takes while you make a call. Other calls do not
 * wait for it, but vmem_log. A fault does where its access gets SIGBUS, at most a second, and
 * others that the same thread serves with it. What a sink logs itself is delivered after it has
 * returned. Lines that come while 256 KiB wait are dropped, and counted in a line. A sink returns:
 * it neither throws nor jumps. Lines that may come for each block: one a second, the rest counted.
 *
 * Lines from before this call still go to the old sink; no thread is inside that any more when this
 * returns, unless a sink made the call: hold no lock that the old sink takes. The line that says
 * why an access gets SIGBUS is delivered before the signal, as a rule, if the sink does not take
 * longer than a second. exit() delivers what is left; where another thread is still in the sink
 * after a second, the rest goes to stderr. _exit() and signals may lose lines. A forked child
 * starts without a line and without a sink.
 */
void vmem_log(void (*sink)(int level, const char *line, void *user), void *user);

/*
 * What a region is to be. Set `size` to sizeof(struct vmem_region_attr) and the rest to zero; then
 * what is wanted. Zero asks for the setting's value of that moment, or for nothing. Later versions
 * add fields at the end: programs built with this header go on to work with them, and get what zero
 * asks for.
 */
struct vmem_region_attr {
	size_t size;       /* of this struct */
	size_t block_size; /* a power of two from 4 KiB to 64 MiB, or VMEM_BLOCK_AUTO; see below */
	uint64_t offset;   /* in the file */
	const char *path;  /* the file, for the flags VMEM_MAP_..; NULL: `fd` is the file, 0 is stdin. Not both: 0 or less in `fd` */
	const char *codec; /* of its blocks on the SSD: "none", "lz4", "zstd" */
	const char *name;  /* as vmem_name */
	int fd;            /* opened again with the flag's access; yours to close, at once if you like */
	int advice;        /* of enum vmem_advice, for the whole region: NORMAL to PRIORITY_HIGH without WILL_NEED, DONT_NEED; see below */
	int checksum;      /* of what is read back from the SSD: 1 verified, -1 not */
	unsigned flags;    /* VMEM_HOST_ONLY, VMEM_FIXED; with a file one of VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE, VMEM_NO_LOCK */
	/*
	 * Where it is to be, if nothing is there: a multiple of 2 MiB, and of block_size if given. A hint, as
	 * mmap's: nothing that is mapped is replaced, and *ptr may be elsewhere. With a device tier it is
	 * where the driver has room.
	 * With VMEM_FIXED and VMEM_HOST_ONLY *ptr is `address`. There the caller has reserved all of `size`,
	 * rounded up to blocks, by private anonymous mappings without rights (PROT_NONE): these are replaced,
	 * nothing else is, and vmem_free puts them back. -EEXIST: something else is mapped there, or
	 * nothing; -EOPNOTSUPP: the module traps.
	 */
	void *address;
	/*
	 * What is in host memory: -1 is left out of core dumps, 1 goes into them; 0: setting core_dump.
	 * It never goes into them where the module traps: 1 is -EOPNOTSUPP there.
	 */
	int core_dump;
};

/*
 * A new region, as vmem_alloc, or with a flag VMEM_MAP_.. as vmem_map, with attributes of its own:
 * nothing that `attr` gives depends on settings, which other parts of the program may change. attr
 * NULL: vmem_alloc(ptr, size, 0). Where neither block_size nor the setting device_block_size says how
 * large the blocks of a device tier on physical handles are, the advice SEQUENTIAL lets them have up
 * to 32 MiB in place of 8, and RANDOM 2 MiB: no advice changes that later.
 * -EINVAL also: an attribute that is not accepted, with its value and what is; a file or an offset
 * without a flag VMEM_MAP_..; a block_size below 2 MiB where the region gets a device tier, or above
 * it where that is on managed memory;
 * -E2BIG a larger struct than this library knows, with something in the rest.
 */
int vmem_create(void **ptr, size_t size, const struct vmem_region_attr *attr);

/*
 * A new region of zeros, at least `size` bytes, aligned to 2 MiB. Takes tables, no memory. flags: 0
 * or VMEM_HOST_ONLY. mlockall() does not keep blocks in memory: they are paged all the same (a
 * lease keeps them). With MCL_CURRENT it reads every block of every region once, and fills frames
 * that are empty, beyond the budget.
 * -EINVAL size 0 or too large, unknown flags; -ENOMEM no memory, addresses or mappings, or a budget
 * below 4 blocks.
 */
int vmem_alloc(void **ptr, size_t size, unsigned flags);

/*
 * A region whose bytes are those of a file or block device from `offset` (a multiple of 4 KiB).
 * flags: exactly one of VMEM_MAP_READ, VMEM_MAP_SHARED, VMEM_MAP_PRIVATE, | VMEM_HOST_ONLY,
 * | VMEM_NO_LOCK. The file may be closed, renamed or unlinked afterwards. A region has one
 * descriptor; SHARED regions of one file share one. POSIX locks (fcntl) of this process on the file
 * stay when a region goes, unless a thread takes one at that moment.
 *
 * SHARED locks the file exclusively (flock) for the region's life; this process may have other,
 * disjoint ranges of it in other SHARED regions. With VMEM_NO_LOCK it takes no lock, and minds
 * none: a program that holds one itself says so by it. Nobody else may write these bytes then.
 *
 * The region may be longer than the file, and the file may become shorter and longer, as with mmap:
 * what is inside the file is right, an access beyond its last page gets SIGBUS, with the reason in
 * the log, and is right when the file has grown (with the module after an acquire or DONT_NEED).
 * Write-back never makes the file longer. Blocks that are in memory when the file becomes shorter
 * are as they were until they leave it.
 *
 * Files that could not be served right later are refused; vmem_last_error() has the reason and what
 * to do:
 * -EPERM: SHARED of a file that is sealed against writing (F_SEAL_WRITE, F_SEAL_FUTURE_WRITE),
 *   immutable, append-only, or under fs-verity. While the region lives F_SEAL_WRITE gets EBUSY.
 * -ETXTBSY: SHARED of an active swap file, or of a program that runs.
 * -EINVAL: not a regular file or block device; a file of a pseudo file system (sysfs, proc, cgroup,
 *   ..), or one that has other bytes than its size says; SHARED of huge pages (hugetlbfs); a block
 *   device, or a file that is sealed against growing, shorter than offset + size; a bad argument.
 * -EBUSY: another process has it SHARED, this process holds a lock of it (flock), or somebody holds
 *   a lease (F_SETLEASE), for a second now; a block device that is mounted; another SHARED region
 *   has some of these bytes (READ and PRIVATE regions of them may see old ones).
 * -EISDIR, -ENOENT, -EACCES, -EROFS, -EMFILE, and others, from opening.
 * A file that refuses its changes later: vmem_discard.
 */
int vmem_map(void **ptr, size_t size, const char *path, uint64_t offset, unsigned flags);

/*
 * Frees a region; `ptr` is what the call that made it returned (NULL: nothing happens, 0). Waits
 * for I/O under way, and for streams that have not come to a release of this region, however long
 * they take. Changed blocks of a shared file are written first; when that fails the region stays
 * and the error is returned (vmem_discard ends it all the same). Without a runtime, after
 * vmem_shutdown: -EINVAL. -EBUSY: live leases. -EIO: blocks of a shared file are lost (vmem_sync)
 * and no call has said so yet; the region stays, and the next call frees it. -EPERM: a part is
 * sealed (mseal) and cannot be unmapped; the region stays as it was, and vmem_evict gives its memory
 * back. Threads faulting in the region meanwhile get SIGBUS.
 *
 * Its memory serves other regions. What none has taken within a second, the system has, as it has
 * all memory that the library holds and does not use.
 *
 * Pins. From Linux 6.8 on, and with the module, a page that somebody pins (O_DIRECT, io_uring and
 * its registered buffers, RDMA, process_vm_writev) stays where it is until the pin ends, whatever is
 * evicted, synced or dropped. Three cases need a VMEM_HOST lease: older kernels, references that are
 * no pins (vmsplice, MSG_ZEROCOPY, io_uring's SEND_ZC of a buffer that is not registered, stores
 * through /proc/PID/mem), and pages whose rights the program has changed (mprotect). Without the
 * lease stores may be lost, and the reader of the pipe, or the receiver, may get bytes of another
 * block. A SHARED region with a pinned page is not freed: -EBUSY, after a second. In any other region that is freed the page lives on, without an
 * address, until its pin ends.
 */
int vmem_free(void *ptr);

/*
 * Frees a region as vmem_free does, whatever its file says. For one whose file refuses changes by
 * now: it was sealed, made immutable or read-only, became a swap file, or its disk is full or fails.
 * They keep their part of host_budget meanwhile, and are tried again. What the file takes is written
 * first, as vmem_free writes it; the rest is lost with the region: -EIO, with the numbers, and the
 * region is gone. Any other error, such as -EBUSY for live leases: it stays.
 */
int vmem_discard(void *ptr);

/* A name for messages and statistics, at most 63 bytes kept. */
int vmem_name(const void *ptr, const char *name);

/*
 * Starts to move the range toward `location`, and returns at once. A hint: it takes effect when
 * `stream` gets here, as cudaMemPrefetchAsync does, or a few milliseconds later; NULL, or where the
 * region has no device tier: now. Where the stream's launch queue is full it returns when there is
 * room again. Work on the stream is not ordered after it. It may be dropped when memory is short,
 * or when 1024 hints wait for their streams. -ENODEV: there is no such device; -EINVAL also: the
 * stream is of no device that has been used; -EBUSY: it is capturing a graph.
 */
int vmem_prefetch(const void *ptr, size_t size, int location, void *stream);

/*
 * Tells how a range will be used. `advice` is of enum vmem_advice. DONT_NEED waits for I/O on its
 * blocks, and as vmem_free for streams, and skips leased and pinned ones (-EBUSY after the rest).
 * Of a SHARED file changes are written, then the blocks leave memory. Changes that the file refuses
 * for good (sealed, immutable, read-only, ..) are dropped, and so are those that it refuses again
 * after a write that failed before (-ENOSPC, -EDQUOT, -EIO: this was the first time, they stay).
 * -EIO once, with the numbers, when changes were dropped; the file's bytes are seen then.
 * -ENOSPC also: a region keeps cold, hot and pin of 256 ranges, and places of 256; NORMAL and UNSET
 * always work, but in the middle of a larger range. What is read mostly and on physical handles
 * stays there when the CPU loads it: kernels and copies that store to it need a WRITE lease, or what
 * they store is lost.
 */
int vmem_advise(const void *ptr, size_t size, int advice, int location);

/*
 * Leases the range to `stream` (VMEM_HOST: to the CPU and DMA) for VMEM_READ, VMEM_WRITE or both:
 * its blocks come to `location` and stay until the matching vmem_release. Waits for disk, for
 * copies between tiers, and for streams that have not come to a vmem_release where that lease holds
 * the range at another location, or room that this one needs; however long they take. Never for
 * other work of a GPU. -ENOMEM: the range and the live leases exceed the budget, named; -EBUSY: a
 * live lease at another location, or the stream is capturing a graph; -EACCES: WRITE of a READ
 * region; -EIO: a block could not be read; -ENOSPC, -EIO: nothing leaves memory, since writes fail
 * (the next vmem_sync does not repeat that one). Nothing is leased then. Leases count: acquire
 * twice, release twice.
 */
int vmem_acquire(const void *ptr, size_t size, unsigned access, int location, void *stream);
/*
 * Ends a lease when the stream gets here. -EINVAL: the range holds a block that this stream has not
 * leased; nothing is released then. -EBUSY: the stream is capturing a graph; the lease stays.
 * Waits, as a launch does, while the stream's launch queue is full; no other thread waits with it.
 * On a stream that was destroyed it waits until the device has done all the work it has; while any
 * stream captures a graph it cannot (that capture fails): -EBUSY, the lease stays. A lease at
 * VMEM_HOST is of no stream: any `stream` releases it.
 */
int vmem_release(const void *ptr, size_t size, void *stream);
/*
 * Leases or releases many ranges, of one or several regions, all or nothing; where a release gets
 * -ENOMEM (no memory to mark a stream) leases at other locations may have ended.
 */
int vmem_acquire_ranges(const struct vmem_range *ranges, size_t count, int location, void *stream);
int vmem_release_ranges(const struct vmem_range *ranges, size_t count, void *stream);

/*
 * Leases ranges, as vmem_acquire_ranges, and gives the lease as a handle: what is ended is what was
 * leased. The ranges are copied. Waits as vmem_acquire does. Do not release by vmem_release what a
 * handle has.
 */
struct vmem_lease;
int vmem_lease(struct vmem_lease **lease, const struct vmem_range *ranges, size_t count, int location, void *stream);
/*
 * Begins a lease and returns at once. It is ready, or has failed, when vmem_lease_poll says so,
 * when vmem_lease_fd's descriptor is readable, or when `ready` (NULL: none) is called: once for
 * each lease, with 0 or a negative errno, which is what vmem_lease would have returned, and
 * vmem_last_error() has its message there. That may be before this returns.
 *
 * Until it is ready nothing is known of the blocks. It is in a stream's order from there on: work
 * that is put on the stream afterwards finds them. The stream has to live until the lease is ended,
 * and what is the default stream is decided here. A lease waits for nothing that another does not
 * make wait too; a lease on its way holds its regions, as a live one: vmem_free answers -EBUSY.
 *
 * `ready` runs on a thread of the library, with every signal blocked but those that its own
 * instructions cause, and no lock held. It may access regions, make any call, end its own lease and
 * others, and take its time; it neither throws nor jumps. vmem_lease_end and vmem_shutdown wait
 * until it has returned: hold no lock that it takes while you call them. In a `ready` neither waits
 * for another one. exit() and a forked child wait for none: leases that are not ready then may
 * never be.
 *
 * -EINVAL: an argument is bad, or the stream is one of each thread (cudaStreamPerThread); -EAGAIN:
 * 64 leases are on their way, or in their `ready`, or no thread can be made; -ENOMEM. There is no
 * lease then, and no call of `ready`.
 */
int vmem_lease_async(struct vmem_lease **lease, const struct vmem_range *ranges, size_t count, int location,
                     void *stream, void (*ready)(struct vmem_lease *lease, int result, void *user), void *user);
/*
 * Says how a lease stands: 0, it is ready; -EAGAIN, not yet; else why it failed, and nothing is
 * leased. -ECANCELED: it was cancelled, or vmem_shutdown has freed its regions. A failed lease has
 * to be ended too.
 */
int vmem_lease_poll(struct vmem_lease *lease);
/*
 * Returns a descriptor (0 or more) that polls readable once the lease is ready or has failed, for
 * event loops. It is the lease's, and closed with it: neither read nor close it. -EMFILE, -ENFILE:
 * there is none to be had.
 */
int vmem_lease_fd(struct vmem_lease *lease);
/*
 * Ends a lease, when `stream` gets here, and forgets the handle. The stream is the lease's, or
 * another one of the same device whose work comes after the last use; at VMEM_HOST any. One that is
 * not ready is cancelled: its `ready` has been called when this returns, as a rule with -ECANCELED,
 * and nothing is leased; this waits for I/O under way. NULL: nothing happens, 0. After
 * vmem_shutdown: 0, the handle is forgotten.
 * -EBUSY: the stream is capturing a graph; -EINVAL: not a lease, not a stream of its device, or
 * vmem_release has been used on its blocks. The lease stays then.
 */
int vmem_lease_end(struct vmem_lease *lease, void *stream);

/*
 * What a kernel is given of a range that is open to it, by value: <vmem/device.cuh> makes a
 * vmem::device_region of it. What is in it is nobody else's business.
 */
struct vmem_kernel_view {
	uint64_t words[16];
};
/*
 * Opens a range to kernels of a device that find out while they run which blocks they need. They
 * ask for a block by <vmem/device.cuh>, wait until it is there, and give it up; a thread of the
 * library pages it in meanwhile, and others out. Kernels that get *view, on any stream of the
 * device, may ask from here on. No lease is needed, and none is in the way: what kernels have
 * asked for is leased to the library itself, at most `budget` bytes of it at once (0: half of
 * device_budget); what is leaving counts as leased until the device has got there. A group of threads
 * can have no more than that at once.
 *
 * access: VMEM_READ, or VMEM_READ | VMEM_WRITE; what is written to is written back when it leaves
 * the device, and with VMEM_WRITE everything that comes counts as written to. To other calls the
 * blocks are leased at the device, with that access: vmem_free of the region answers -EBUSY, a
 * block that is leased elsewhere cannot be had by kernels, and one that has come cannot be had
 * elsewhere. One range may be open more than once. As under any lease, an access of the CPU waits for
 * a block that has come with VMEM_WRITE, and gets SIGBUS after fault_timeout_ms; and where the range
 * is open for reading alone, kernels see what the CPU stores to a block only when it has left the
 * device and come again. Close a range before the CPU works on it.
 *
 * A block that cannot be had is an error to whoever asks for it there, with its reason in the log;
 * half a second later it may be asked for again. Kernels end their waits by themselves, in the
 * device's time, when nothing gets on (vmem/device.cuh), after a fork, and when the process exits.
 *
 * Load what will run before: CUDA loads a kernel at its first launch, may wait for those that run,
 * and stops every other CUDA call of the process meanwhile, the library's among them. A first launch
 * beside kernels that wait for blocks lasts until these give up. Either CUDA_MODULE_LOADING=EAGER is
 * in the environment, or each kernel was launched once, or asked for by cudaFuncGetAttributes. The
 * same goes for cudaFree, which waits for every kernel of the device: cudaFreeAsync does not.
 *
 * -ENODEV, -EINVAL, -EACCES as vmem_acquire; -ENOMEM: `budget` is above device_budget; -EAGAIN: no
 * thread can be made; -ECANCELED: vmem_shutdown or exit() came meanwhile; -EOPNOTSUPP: the device
 * tier is one of managed memory (setting device: handles is another), or this device cannot do it.
 */
struct vmem_kernel;
int vmem_kernel_begin(struct vmem_kernel **kernel, const void *ptr, size_t size, unsigned access, int device,
                      size_t budget, struct vmem_kernel_view *view);
/*
 * Closes a range to kernels, when `stream` gets here, and forgets the handle: every kernel that was
 * given the view has been put on the stream, or comes before what is on it. Waits for that, however
 * long it takes, and serves requests meanwhile; a kernel that is put on a stream later meets memory
 * that is nobody's. NULL for the handle: nothing happens, 0. vmem_shutdown ends waits of kernels
 * first and then waits for them; the handle has to be given here all the same, and is forgotten.
 * -EBUSY: the stream is capturing a graph; -EINVAL: not an open range, or not a stream of its
 * device; -ECANCELED: exit() came, and half a second later kernels run on. It stays open then.
 */
int vmem_kernel_end(struct vmem_kernel *kernel, void *stream);

/*
 * Hands the memory of leased blocks at a device out of the process, as a descriptor in *fd that is the caller's to
 * close (close on exec). 0: of the one block that has the range, for cuMemImportFromShareableHandle in another process
 * (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR): block_size bytes, vmem_query, from an address that is a multiple of it.
 * VMEM_EXPORT_DMA_BUF: a dma-buf of all the blocks that have a byte of the range, for another driver, such as that of a
 * network card. Waits for copies under way; work on streams is the caller's to wait for.
 *
 * Each block of the range has to be under a live lease at one device, which has to last as long as anybody outside uses
 * the memory. What they store counts under a lease for writing alone, and nothing orders it with streams but the caller:
 * release when they are done. When the lease has ended and the block leaves the device, the descriptor and what was made
 * of it keep the memory, with the bytes that were there, until they are closed; it is never another block's. Until then
 * the device has less memory than device_budget counts. So export what stays, not each block for each use: memory that
 * was exported is not kept for the next block, which takes tens of microseconds more.
 *
 * -EINVAL: a block of the range is not leased so, or *fd is to be of several blocks; -EBUSY: the CPU stored to one of
 * them under a READ lease; -EOPNOTSUPP: a region without a device tier, or on managed memory, or the device or its
 * driver cannot do it; -EIO: the device is lost, or its driver has refused.
 */
int vmem_export(const void *ptr, size_t size, unsigned flags, int *fd);

/*
 * Moves the range's blocks out to `location` (VMEM_HOST or VMEM_SSD) and returns when it is done.
 * Waits for streams as vmem_free does. Leased blocks are skipped. -EBUSY: a page of a block is
 * pinned, and the block stays in memory; the other blocks have left. -ENOSPC, -EFBIG, -EIO: the first
 * write that failed; its block stays in memory. -EIO: blocks are lost, see vmem_sync.
 */
int vmem_evict(const void *ptr, size_t size, int location);

/*
 * Writes changed blocks of the range back. Returns when stores made before the call (and by
 * released leases) have a copy on the SSD: for a shared file durable, as fsync; for anonymous
 * memory a copy that does not outlive the process. -EBUSY: blocks under a live WRITE lease were
 * skipped, the rest is synced. Waits for streams as vmem_free does. -ENOSPC, -EFBIG (the limit of
 * `ulimit -f`, for a shared file), -EIO: also reports write-backs that failed in the background
 * since the last call.
 *
 * -EIO also while blocks of the range are lost: a device that had their only copy was lost, a move
 * of their pages stopped half way, or what was stored cannot be read back. The message names the
 * first, the rest of the range is synced. Accesses of a lost block get SIGBUS, an acquire -EIO;
 * never older bytes. It stays lost until VMEM_ADVISE_DONT_NEED, after which it is zeros, or what
 * the file has (a shared file's too), or until vmem_free. One that could not be read is read again by
 * an acquire, and by accesses. vmem_sync(NULL, 0): every region that there is when the call begins.
 * All are tried; the error is the first, and -EBUSY only where there is no other. A process without
 * regions has nothing to sync: 0, and nothing is started.
 */
int vmem_sync(const void *ptr, size_t size);

/*
 * Writes changed blocks of every shared file, also those under live leases, as exit() does, and
 * returns when the files have them: they outlive the process, and not the machine (vmem_sync). To be
 * called before what ends a process without exit(): _exit, exec, quick_exit. It waits for devices
 * with a live lease for writing, at most fault_timeout_ms in which none gets on, and for disks
 * without limit. What was not written is logged, and the first failure is returned: -ENOSPC, -EFBIG,
 * -EIO, -ETIMEDOUT. 0 without regions; nothing is started. Not from a signal handler.
 */
int vmem_flush(void);

/*
 * From now on each of these `count` signals, when it comes to the process, has shared files written as by
 * exit(), for as long as that gets on (30 s without progress end it), and then its default action. A
 * thread of the library's does it, while the program's go on. The same signal again ends the process
 * at once. SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU and SIGPWR are
 * accepted. One that is ignored stays so, and one for which sigaction() is called later is the
 * program's. In a forked child they have their default action. -EINVAL: another signal, or none;
 * -EBUSY: the program has a handler for it, which can have a thread call vmem_flush or exit();
 * nothing has changed then. -EAGAIN, -ENOMEM: no thread. Process 1 of a container, where the kernel
 * takes no default action, ends by _exit(128 + the signal).
 */
int vmem_flush_on(const int *signals, size_t count);

/*
 * Bytes of the range in each tier at this moment. A block on its way to a device counts as host
 * memory until its copy is issued: a CPU access before that may call it back. out->size set by the
 * caller.
 */
int vmem_query(const void *ptr, size_t size, struct vmem_residency *out);
/* Counters since the runtime started: see vmem_set and vmem_shutdown. out->size set by the caller; fields beyond it are not written. */
int vmem_stats(struct vmem_stats *out);
/* Counters of a device. -ENODEV: there is no such device. */
int vmem_device_stats(int device, struct vmem_device_stats *out);

/* A fixed string that says what an errno, negative or positive, means. Never NULL. */
const char *vmem_strerror(int err);
/*
 * The message of the calling thread's last failure; "" if none. Valid until the thread's next
 * libvmem call.
 */
const char *vmem_last_error(void);

#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#ifdef __cplusplus
}
#endif
#endif /* VMEM_VMEM_H */
