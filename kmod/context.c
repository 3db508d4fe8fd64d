// SPDX-License-Identifier: GPL-2.0-only
/*
 * context.c - module load; open files: ranges of offsets, mappings, calls
 * Each context has its own inode and address_space: zapping an offset zaps it in no other context.
 */

#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/nospec.h>
#include <linux/pseudo_fs.h>
#include <linux/user_namespace.h>

#include "vmem.h"

#define VMEM_FS_MAGIC	0x766d656d

LIST_HEAD(vmem_ctx_list);
static LIST_HEAD(vmem_users);		/* vmem_ctx_list_lock */
DEFINE_MUTEX(vmem_ctx_list_lock);
static struct vfsmount *vmem_mnt;
static struct shrinker *vmem_shrinker;

#ifdef VMEM_DELAY
#include "delay/point.h"
#endif

static int vmem_fs_init_context(struct fs_context *fc)
{
	return init_pseudo(fc, VMEM_FS_MAGIC) ? 0 : -ENOMEM;
}

/* No .owner: the mount would pin the module that has to end it. It is never registered. */
static struct file_system_type vmem_fs = {
	.name = "vmem",
	.init_fs_context = vmem_fs_init_context,
	.kill_sb = kill_anon_super,
};

/* Charges @n records to the user, or returns them if negative. False: over a limit. */
bool vmem_record(struct vmem_ctx *ctx, int n)
{
	u64 limit = vmem_get(vmem_user_limit_records);

	if (atomic64_add_return(n, &ctx->user->records) > limit && limit && n > 0 &&
	    !ctx->unlimited) {
		atomic64_sub(n, &ctx->user->records);
		vmem_add(vmem_refused_limit, 1);
		return false;
	}
	vmem_add(vmem_records, n);
	return true;
}

/* The user who pays for the caller: docs/kernel-module.md, "Users and their namespaces". */
static kuid_t vmem_payer(void)
{
	struct user_namespace *ns;
	kuid_t uid = current_uid();

	for (ns = current_user_ns(); ns != &init_user_ns; ns = ns->parent) {
		kuid_t maker = uid_eq(ns->owner, GLOBAL_ROOT_UID) ? make_kuid(ns, 0) : ns->owner;

		if (uid_valid(maker) && !uid_eq(maker, GLOBAL_ROOT_UID))
			uid = maker;
	}
	return uid;
}

/* Returns the caller's account, made at the first use. NULL: no memory. */
static struct vmem_user *vmem_user_get(void)
{
	struct vmem_user *user, *fresh = kzalloc(sizeof(*fresh), GFP_KERNEL_ACCOUNT);

	if (!fresh)
		return NULL;
	fresh->uid = vmem_payer();
	refcount_set(&fresh->ref, 1);
	mutex_lock(&vmem_ctx_list_lock);
	list_add_tail(&fresh->link, &vmem_users);
	list_for_each_entry(user, &vmem_users, link)
		if (uid_eq(user->uid, fresh->uid))
			break;	/* at the latest the fresh one */
	if (user != fresh) {
		refcount_inc(&user->ref);
		list_del(&fresh->link);
		kfree(fresh);
	}
	mutex_unlock(&vmem_ctx_list_lock);
	return user;
}

void vmem_user_put(struct vmem_user *user)
{
	mutex_lock(&vmem_ctx_list_lock);
	if (refcount_dec_and_test(&user->ref)) {
		list_del(&user->link);
		kfree(user);
	}
	mutex_unlock(&vmem_ctx_list_lock);
}

static void vmem_range_free(struct kref *ref)
{
	struct vmem_range *range = container_of(ref, struct vmem_range, ref);
	unsigned long index;
	int records = 1;
	void *unit;

	/* This was the last use: a region holds no frames, a pool's frames are not installed. */
	xa_for_each(&range->units, index, unit) {
		if (range->kind == VMEM_KIND_POOL) {
			vmem_frame_free(range, unit);
		} else {
			kfree(unit);
			records++;
		}
		cond_resched();
	}
	vmem_record(range->ctx, -records);
	xa_destroy(&range->units);
	vmem_add(vmem_regions, -(range->kind == VMEM_KIND_REGION));
	kfree_rcu(range, rcu);
}

void vmem_range_put(struct vmem_range *range)
{
	kref_put(&range->ref, vmem_range_free);
}

/* Returns the range of @kind (0: any) that holds byte @offset, referenced, or NULL. */
struct vmem_range *vmem_range_find(struct vmem_ctx *ctx, u64 offset, u32 kind)
{
	struct vmem_range *range;

	rcu_read_lock();
	range = mtree_load(&ctx->ranges, offset >> PAGE_SHIFT);
	if (range && ((kind && range->kind != kind) || !kref_get_unless_zero(&range->ref)))
		range = NULL;
	rcu_read_unlock();
	return range;
}

/* The same for @count whole units from @offset on; *@index: number of the first. Or an error. */
struct vmem_range *vmem_units_find(struct vmem_ctx *ctx, u64 offset, u32 kind, u32 count,
				   unsigned long *index)
{
	struct vmem_range *range = vmem_range_find(ctx, offset, kind);
	bool aligned;

	if (!range)
		return ERR_PTR(count ? -ENXIO : -EINVAL);
	offset -= vmem_unit_offset(range, 0);
	*index = offset >> PAGE_SHIFT >> range->unit_shift;
	vmem_point();
	aligned = !(offset & (vmem_unit_bytes(range) - 1));
	if (aligned && count && count <= (range->pages >> range->unit_shift) - *index)
		return range;
	vmem_range_put(range);
	return ERR_PTR(aligned && count ? -ERANGE : -EINVAL);
}

static int vmem_create(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_create *arg = argument;
	struct vmem_range *range;
	pgoff_t align, start, pages = arg->size >> PAGE_SHIFT;
	int err;

	if (arg->pad || arg->flags & ~VMEM_CREATE_LONGTERM ||
	    (arg->kind != VMEM_KIND_REGION && (arg->kind != VMEM_KIND_POOL || arg->flags)) ||
	    arg->unit < VMEM_UNIT_MIN || arg->unit > VMEM_UNIT_MAX || !is_power_of_2(arg->unit) ||
	    !arg->size || arg->size > VMEM_RANGE_MAX || arg->size & (arg->unit - 1))
		return -EINVAL;
	if (arg->kind == VMEM_KIND_REGION && !vmem_get(vmem_trap_enabled))
		return -EPERM;
	align = max_t(pgoff_t, arg->unit, PMD_SIZE) >> PAGE_SHIFT;
	vmem_lock(ctx);
	start = ALIGN(ctx->next_pgoff, align);
	err = start + pages > (MAX_LFS_FILESIZE >> PAGE_SHIFT) - 2 * align ? -ENOSPC : 0;
	/* A gap between ranges: no mapping grows or merges into the next range. */
	if (!err)
		ctx->next_pgoff = start + pages + align;
	vmem_unlock(ctx);
	if (err)
		return err;
	if (!vmem_record(ctx, 1))
		return -EDQUOT;
	range = kzalloc(sizeof(*range), VMEM_CALL_GFP);
	if (!range) {
		vmem_record(ctx, -1);
		return -ENOMEM;
	}
	kref_init(&range->ref);
	range->ctx = ctx;
	range->kind = arg->kind;
	range->longterm = arg->flags & VMEM_CREATE_LONGTERM;
	range->unit_shift = ilog2(arg->unit) - PAGE_SHIFT;
	range->pgoff = start;
	range->pages = pages;
	xa_init_flags(&range->units, XA_FLAGS_ACCOUNT);
	vmem_add(vmem_regions, range->kind == VMEM_KIND_REGION);
	err = mtree_insert_range(&ctx->ranges, start, start + pages - 1, range, VMEM_CALL_GFP);
	if (err)
		vmem_range_put(range);
	else
		arg->offset = (u64)start << PAGE_SHIFT;
	return err;
}

static int vmem_destroy(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_destroy *arg = argument;
	struct vmem_range *range = vmem_range_find(ctx, arg->offset, 0);
	int err = 0;

	if (!range)
		return -ENXIO;
	vmem_lock(ctx);
	if (range->dead || arg->offset != vmem_unit_offset(range, 0))
		err = -ENXIO;
	else if (range->kind == VMEM_KIND_POOL && !xa_empty(&range->units))
		err = -EBUSY;
	else
		range->dead = true;	/* from here on only this thread ends it */
	vmem_unlock(ctx);
	if (!err) {
		if (range->kind == VMEM_KIND_REGION)
			vmem_region_empty(range);
		vmem_point();
		mtree_erase(&ctx->ranges, range->pgoff);
		/* Without memory for that it stays named, and dead, until ->release. */
		if (mtree_load(&ctx->ranges, range->pgoff) != range)
			vmem_range_put(range);
	}
	vmem_range_put(range);
	return err;
}

static int vmem_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct vmem_ctx *ctx = file->private_data;
	struct vmem_range *range;

	if (!READ_ONCE(ctx->ready) || READ_ONCE(ctx->dead))
		return READ_ONCE(ctx->ready) ? -ESHUTDOWN : -EPROTO;
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	range = vmem_range_find(ctx, (u64)vma->vm_pgoff << PAGE_SHIFT, 0);
	if (!range)
		return -ENXIO;
	if (vma_pages(vma) > range->pages - (vma->vm_pgoff - range->pgoff)) {
		vmem_range_put(range);
		return -ENXIO;
	}
	vmem_point();
	/* DONTEXPAND: mremap cannot grow it; mlock, KSM, khugepaged, migration skip it. */
	vm_flags_set(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	vma->vm_ops = range->kind == VMEM_KIND_POOL || range->longterm ?
		      &vmem_vm_ops : &vmem_watched_vm_ops;
	vma->vm_private_data = range;	/* takes over the reference */
	return 0;
}

static int vmem_open(struct inode *inode, struct file *file)
{
	struct vmem_ctx *ctx;
	int i, err;

	if (!(file->f_mode & FMODE_READ) || !(file->f_mode & FMODE_WRITE))
		return -EACCES;	/* shared mappings need both */
	ctx = kzalloc(sizeof(*ctx), GFP_KERNEL_ACCOUNT);
	if (!ctx)
		return -ENOMEM;
	ctx->user = vmem_user_get();
	ctx->unlimited = ns_capable_noaudit(&init_user_ns, CAP_SYS_RESOURCE);
	ctx->inode = alloc_anon_inode(vmem_mnt->mnt_sb);
	err = ctx->user ? PTR_ERR_OR_ZERO(ctx->inode) : -ENOMEM;
	if (!err && !vmem_record(ctx, VMEM_CTX_RECORDS))
		err = -EDQUOT;
	if (err) {
		if (!IS_ERR(ctx->inode))
			iput(ctx->inode);
		if (ctx->user)
			vmem_user_put(ctx->user);
		kfree(ctx);
		return err;
	}
	/* The kernel maps no huge entry that reaches beyond the file's end. */
	i_size_write(ctx->inode, MAX_LFS_FILESIZE);
	spin_lock_init(&ctx->lock);
	/* vmem_range_find() takes no lock. The kernel frees a tree of another kind wrongly. */
	mt_init_flags(&ctx->ranges, MT_FLAGS_ALLOC_RANGE | MT_FLAGS_USE_RCU);
	xa_init_flags(&ctx->pins, XA_FLAGS_ALLOC1 | XA_FLAGS_ACCOUNT);
	init_waitqueue_head(&ctx->event_wq);
	for (i = 0; i < VMEM_QUEUES; i++)
		init_waitqueue_head(&ctx->fault_wq[i]);
	INIT_LIST_HEAD(&ctx->events);
	ctx->owner = get_pid(task_tgid(current));
	ctx->knobs_seen = atomic_read(&vmem_knobs_seq);
	ctx->next_pgoff = PMD_SIZE >> PAGE_SHIFT;	/* offset 0 names nothing */
	file->private_data = ctx;
	file->f_mapping = ctx->inode->i_mapping;
	mutex_lock(&vmem_ctx_list_lock);
	list_add_tail(&ctx->link, &vmem_ctx_list);
	mutex_unlock(&vmem_ctx_list_lock);
	vmem_add(vmem_contexts, 1);
	return nonseekable_open(inode, file);
}

/* Parked threads find the context dead and get SIGBUS; present blocks stay present. */
static int vmem_shutdown(struct vmem_ctx *ctx, void *unused)
{
	int i;

	vmem_lock(ctx);
	ctx->dead = true;
	vmem_unlock(ctx);
	for (i = 0; i < VMEM_QUEUES; i++)
		wake_up_all(&ctx->fault_wq[i]);
	wake_up_all(&ctx->event_wq);
	return 0;
}

/*
 * Called at each close(2), also at exit. When the opener closes, no process answers any more.
 * Mappings hold the file: ->release would come too late for threads that wait in one of them.
 */
static int vmem_flush(struct file *file, fl_owner_t id)
{
	struct vmem_ctx *ctx = file->private_data;

	return task_tgid(current) == ctx->owner ? vmem_shutdown(ctx, NULL) : 0;
}

/* No mapping, parked thread or call is left: each of them holds the file. */
static int vmem_file_release(struct inode *inode, struct file *file)
{
	struct vmem_ctx *ctx = file->private_data;
	struct vmem_range *range;
	unsigned long index = 0;

	mutex_lock(&vmem_ctx_list_lock);
	list_del(&ctx->link);
	mutex_unlock(&vmem_ctx_list_lock);
	vmem_unpin_all(ctx);
	/* Regions first: they return their frames to the pools. */
	mt_for_each(&ctx->ranges, range, index, ULONG_MAX)
		if (range->kind == VMEM_KIND_REGION)
			vmem_region_empty(range);
	index = 0;
	mt_for_each(&ctx->ranges, range, index, ULONG_MAX)
		vmem_range_put(range);
	mtree_destroy(&ctx->ranges);
	if (ctx->eventfd)
		eventfd_ctx_put(ctx->eventfd);
	iput(ctx->inode);
	put_pid(ctx->owner);
	vmem_record(ctx, -VMEM_CTX_RECORDS);
	vmem_user_put(ctx->user);
	kfree(ctx);
	vmem_add(vmem_contexts, -1);
	return 0;
}

static bool kernel_faults;
module_param(kernel_faults, bool, 0644);
MODULE_PARM_DESC(kernel_faults, "System calls of every process may wait for blocks, not only with CAP_SYS_PTRACE");

static int vmem_hello(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_hello *arg = argument;
	u32 version = arg->version;

	if (arg->pad)
		return -EINVAL;
	arg->version = VMEM_UAPI_VERSION;
	if (version != VMEM_UAPI_VERSION)
		return -EPROTONOSUPPORT;
	arg->event_size = sizeof(struct vmem_event);
	arg->features = VMEM_FEATURE_PROTECT | VMEM_FEATURE_EVENTFD | VMEM_FEATURE_PIN |
			VMEM_FEATURE_PRESSURE | VMEM_FEATURE_KNOBS;
	if (vmem_get(vmem_trap_enabled))
		arg->features |= VMEM_FEATURE_TRAP;
	if (kernel_faults || ns_capable_noaudit(&init_user_ns, CAP_SYS_PTRACE))
		arg->features |= VMEM_FEATURE_KERNEL_FAULTS;
	if (IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE))
		arg->features |= VMEM_FEATURE_HUGE;
	arg->unit_min = VMEM_UNIT_MIN;
	arg->unit_max = VMEM_UNIT_MAX;
	arg->batch_max = VMEM_BATCH_MAX;
	if (arg->need & ~arg->features)
		return -EOPNOTSUPP;
	if (arg->need & VMEM_FEATURE_KERNEL_FAULTS)
		WRITE_ONCE(ctx->kernel_faults, true);
	WRITE_ONCE(ctx->ready, true);
	return 0;
}

static int vmem_info(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_info *arg = argument;

	arg->frame_limit = vmem_get(vmem_frame_limit_bytes);
	arg->context_limit = vmem_get(vmem_context_limit_bytes);
	arg->readahead_bytes = vmem_get(vmem_readahead_bytes);
	arg->fault_timeout_ms = vmem_get(vmem_fault_timeout_ms);
	arg->watermark_low = vmem_get(vmem_watermark_low_percent);
	arg->watermark_high = vmem_get(vmem_watermark_high_percent);
	arg->frame_order = vmem_get(vmem_frame_order);
	arg->pinned_bytes = atomic64_read(&ctx->pinned_bytes);
	vmem_lock(ctx);
	arg->frame_bytes = ctx->frame_bytes;
	arg->installed_bytes = ctx->installed_bytes;
	arg->asked_bytes = vmem_asked(ctx);
	vmem_unlock(ctx);
	return 0;
}

/* Size of each call's argument, and its handler. */
static const struct {
	u8 size;
	int (*call)(struct vmem_ctx *ctx, void *arg);
} vmem_calls[] = {
	[_IOC_NR(VMEM_IOC_HELLO)] = { sizeof(struct vmem_hello), vmem_hello },
	[_IOC_NR(VMEM_IOC_CREATE)] = { sizeof(struct vmem_create), vmem_create },
	[_IOC_NR(VMEM_IOC_DESTROY)] = { sizeof(struct vmem_destroy), vmem_destroy },
	[_IOC_NR(VMEM_IOC_POPULATE)] = { sizeof(struct vmem_populate), vmem_populate },
	[_IOC_NR(VMEM_IOC_RELEASE)] = { sizeof(struct vmem_release), vmem_release },
	[_IOC_NR(VMEM_IOC_BATCH)] = { sizeof(struct vmem_batch), vmem_batch },
	[_IOC_NR(VMEM_IOC_EVENTFD)] = { sizeof(struct vmem_eventfd), vmem_set_eventfd },
	[_IOC_NR(VMEM_IOC_PIN)] = { sizeof(struct vmem_pin), vmem_pin },
	[_IOC_NR(VMEM_IOC_UNPIN)] = { sizeof(struct vmem_unpin), vmem_unpin },
	[_IOC_NR(VMEM_IOC_INFO)] = { sizeof(struct vmem_info), vmem_info },
	[_IOC_NR(VMEM_IOC_SHUTDOWN)] = { 0, vmem_shutdown },
};

/* No lock is held during the copies: the memory may lie in a region of this context. */
static long vmem_ioctl(struct file *file, unsigned int cmd, unsigned long uarg)
{
	struct vmem_ctx *ctx = file->private_data;
	unsigned int nr = _IOC_NR(cmd), size = _IOC_SIZE(cmd);
	void __user *user = (void __user *)uarg;
	u64 arg[10];	/* aligned for every argument */
	int ret;

	BUILD_BUG_ON(sizeof(arg) < sizeof(struct vmem_info));
	if (_IOC_TYPE(cmd) != VMEM_IOC_MAGIC || nr >= ARRAY_SIZE(vmem_calls))
		return -ENOTTY;
	nr = array_index_nospec(nr, ARRAY_SIZE(vmem_calls));
	if (size < vmem_calls[nr].size)
		return -EMSGSIZE;
	/* A caller newer than the module may send more, as long as it is zero. */
	ret = copy_struct_from_user(arg, vmem_calls[nr].size, user, size);
	if (ret)
		return ret;
	if (nr != _IOC_NR(VMEM_IOC_HELLO) && !READ_ONCE(ctx->ready))
		return -EPROTO;
	if (READ_ONCE(ctx->dead))
		return -ESHUTDOWN;
	ret = vmem_calls[nr].call(ctx, arg);
	if (_IOC_DIR(cmd) & _IOC_READ && copy_to_user(user, arg, vmem_calls[nr].size))
		return -EFAULT;
	return ret;
}

static const struct file_operations vmem_fops = {
	.owner = THIS_MODULE,
	.open = vmem_open,
	.flush = vmem_flush,
	.release = vmem_file_release,
	.mmap = vmem_mmap,
	.get_unmapped_area = thp_get_unmapped_area,	/* 2 MiB frames map as one entry */
	.unlocked_ioctl = vmem_ioctl,
	.compat_ioctl = vmem_ioctl,
	.read = vmem_read,
	.poll = vmem_poll,
};

static unsigned long frame_limit_mib;
module_param(frame_limit_mib, ulong, 0444);
MODULE_PARM_DESC(frame_limit_mib, "First frame_limit_bytes, in MiB (0: half of RAM)");

static unsigned int fault_timeout_ms;
module_param(fault_timeout_ms, uint, 0444);
MODULE_PARM_DESC(fault_timeout_ms, "First fault_timeout_ms: a touch waits, then SIGBUS (0: 30000)");

static struct miscdevice vmem_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = VMEM_DEVICE_NAME,
	.fops = &vmem_fops,
	.groups = vmem_groups,
	.mode = 0600,	/* the udev rule opens it to the group vmem */
};

/* Ends what vmem_init() began, however far it got. No file is open: each one pins the module. */
static void vmem_cleanup(void)
{
	vmem_frames_end();
	if (vmem_line_wq)
		destroy_workqueue(vmem_line_wq);
	if (vmem_shrinker) {
		shrinker_free(vmem_shrinker);
		list_lru_destroy(&vmem_frames);
	}
	kern_unmount(vmem_mnt);
	rcu_barrier();	/* ranges that kfree_rcu() still frees */
	vmem_sysfs_exit();
}

static int __init vmem_init(void)
{
	u64 limit = frame_limit_mib ? (u64)frame_limit_mib << 20 : totalram_pages() * PAGE_SIZE / 2;
	int err;

	BUILD_BUG_ON(BITS_PER_LONG != 64);
	atomic64_set(&vmem_files[vmem_frame_limit_bytes].value, limit);
	/* A user leaves a quarter to others; records: 1 % of RAM, or 20 % if each has xa_nodes. */
	atomic64_set(&vmem_files[vmem_user_limit_bytes].value, limit / 4 * 3);
	atomic64_set(&vmem_files[vmem_user_limit_records].value,
		     max(65536UL, totalram_pages() / 4));
	if (fault_timeout_ms)
		atomic64_set(&vmem_files[vmem_fault_timeout_ms].value,
			     clamp(fault_timeout_ms, 100U, 3600000U));
	vmem_mnt = kern_mount(&vmem_fs);
	vmem_shrinker = vmem_shrinker_start(&vmem_shrinker_model, &vmem_frames);
	vmem_frame_cache = KMEM_CACHE(vmem_frame, SLAB_ACCOUNT);
	vmem_line_wq = alloc_workqueue("vmem", WQ_UNBOUND | WQ_HIGHPRI, WQ_MAX_ACTIVE);
	err = PTR_ERR_OR_ZERO(vmem_mnt) ?:
	      (vmem_shrinker && vmem_frame_cache && vmem_line_wq ? vmem_sysfs_init() : -ENOMEM);
	if (!err)
		err = misc_register(&vmem_misc);
	if (err)
		vmem_cleanup();
	return err;
}

static void __exit vmem_exit(void)
{
	misc_deregister(&vmem_misc);
	vmem_cleanup();
}

module_init(vmem_init);
module_exit(vmem_exit);

MODULE_DESCRIPTION("Frames, traps and fault events for libvmem");
MODULE_LICENSE("GPL");
MODULE_VERSION("1.0");
