// SPDX-License-Identifier: GPL-2.0-only
/*
 * context.c - an open file, its ranges of offsets, its mappings and its calls
 *
 * All opens of one device node share the node's address_space, and zapping an
 * offset there would zap it in every context. So each context has an inode of its
 * own, from a pseudo file system nobody can mount.
 */

#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/pid.h>
#include <linux/pseudo_fs.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "vmem.h"

#define VMEM_FS_MAGIC	0x766d656d

LIST_HEAD(vmem_ctx_list);
DEFINE_SPINLOCK(vmem_ctx_list_lock);
static struct vfsmount *vmem_mnt;

static int vmem_fs_init_context(struct fs_context *fc)
{
	return init_pseudo(fc, VMEM_FS_MAGIC) ? 0 : -ENOMEM;
}

/* No .owner: the mount would pin the module that ends it. It is never registered. */
static struct file_system_type vmem_fs = {
	.name = "vmem",
	.init_fs_context = vmem_fs_init_context,
	.kill_sb = kill_anon_super,
};

int vmem_context_init(void)
{
	vmem_mnt = kern_mount(&vmem_fs);
	return PTR_ERR_OR_ZERO(vmem_mnt);
}

void vmem_context_exit(void)
{
	kern_unmount(vmem_mnt);
	rcu_barrier();	/* ranges on their way through kfree_rcu() */
}

/* Ranges */

static void vmem_range_free(struct kref *ref)
{
	struct vmem_range *range = container_of(ref, struct vmem_range, ref);
	unsigned long index;
	void *unit;

	/* The last user is gone: a region holds no frames, a pool's are not installed. */
	xa_for_each(&range->units, index, unit) {
		if (range->kind == VMEM_KIND_POOL)
			vmem_frame_free(unit);
		else
			kfree(unit);
	}
	xa_destroy(&range->units);
	if (range->kind == VMEM_KIND_REGION)
		vmem_add(vmem_c_regions, -1);
	kfree_rcu(range, rcu);
}

void vmem_range_put(struct vmem_range *range)
{
	kref_put(&range->ref, vmem_range_free);
}

/* The range of @kind (0: any) that holds byte @offset, referenced, or NULL. */
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

static int vmem_create(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_create *arg = argument;
	struct vmem_range *range;
	pgoff_t align, start;
	int err;

	if (arg->pad || arg->flags & ~VMEM_CREATE_LONGTERM)
		return -EINVAL;
	if (arg->kind != VMEM_KIND_REGION && (arg->kind != VMEM_KIND_POOL || arg->flags))
		return -EINVAL;
	if (arg->unit < VMEM_UNIT_MIN || arg->unit > VMEM_UNIT_MAX || !is_power_of_2(arg->unit))
		return -EINVAL;
	if (!arg->size || arg->size > VMEM_RANGE_MAX || arg->size & (arg->unit - 1))
		return -EINVAL;
	if (arg->kind == VMEM_KIND_REGION && !READ_ONCE(vmem_knobs.trap_enabled))
		return -EPERM;

	range = kzalloc(sizeof(*range), GFP_KERNEL_ACCOUNT);
	if (!range)
		return -ENOMEM;
	kref_init(&range->ref);
	range->ctx = ctx;
	range->kind = arg->kind;
	range->longterm = arg->flags & VMEM_CREATE_LONGTERM;
	range->unit_shift = ilog2(arg->unit) - PAGE_SHIFT;
	range->pages = arg->size >> PAGE_SHIFT;
	xa_init_flags(&range->units, XA_FLAGS_ACCOUNT);

	align = max_t(pgoff_t, arg->unit, PMD_SIZE) >> PAGE_SHIFT;
	spin_lock(&ctx->lock);
	start = ALIGN(ctx->next_pgoff, align);
	if (start + range->pages > (MAX_LFS_FILESIZE >> PAGE_SHIFT) - 2 * align) {
		spin_unlock(&ctx->lock);
		kfree(range);
		return -ENOSPC;
	}
	/* A gap between ranges: no mapping grows or merges from one into the next. */
	ctx->next_pgoff = start + range->pages + align;
	spin_unlock(&ctx->lock);
	range->pgoff = start;

	if (range->kind == VMEM_KIND_REGION)
		vmem_count(vmem_c_regions);
	err = mtree_insert_range(&ctx->ranges, start, start + range->pages - 1, range, GFP_KERNEL);
	if (err) {
		vmem_range_put(range);
		return err;
	}
	arg->offset = (u64)start << PAGE_SHIFT;
	return 0;
}

/* Takes a range that is marked dead out of its context. May sleep. */
static void vmem_range_end(struct vmem_range *range)
{
	if (range->kind == VMEM_KIND_REGION)
		vmem_region_empty(range);
	mtree_erase(&range->ctx->ranges, range->pgoff);
	vmem_range_put(range);
}

static int vmem_destroy(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_destroy *arg = argument;
	struct vmem_range *range = vmem_range_find(ctx, arg->offset, 0);
	int err = -ENXIO;

	if (!range)
		return err;
	if (arg->offset != (u64)range->pgoff << PAGE_SHIFT)
		goto out;
	spin_lock(&ctx->lock);
	if (!range->dead)
		err = range->kind == VMEM_KIND_POOL && !xa_empty(&range->units) ? -EBUSY : 0;
	if (!err)
		range->dead = true;	/* from here on this thread alone ends it */
	spin_unlock(&ctx->lock);
	if (!err)
		vmem_range_end(range);
out:
	vmem_range_put(range);
	return err;
}

/* Mappings */

void vmem_vma_open(struct vm_area_struct *vma)
{
	struct vmem_range *range = vma->vm_private_data;

	kref_get(&range->ref);
}

void vmem_vma_close(struct vm_area_struct *vma)
{
	vmem_range_put(vma->vm_private_data);
}

static int vmem_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct vmem_ctx *ctx = file->private_data;
	struct vmem_range *range;

	if (!READ_ONCE(ctx->ready))
		return -EPROTO;
	if (READ_ONCE(ctx->dead))
		return -ESHUTDOWN;
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	range = vmem_range_find(ctx, (u64)vma->vm_pgoff << PAGE_SHIFT, 0);
	if (!range)
		return -ENXIO;
	if (vma_pages(vma) > range->pages - (vma->vm_pgoff - range->pgoff)) {
		vmem_range_put(range);
		return -ENXIO;
	}
	/*
	 * Not inherited by fork, not dumped. DONTEXPAND keeps mremap from growing it
	 * and, being "special", the mapping out of mlock, KSM, khugepaged and migration.
	 */
	vmem_vma_set_flags(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	if (range->kind == VMEM_KIND_POOL)
		vma->vm_ops = &vmem_pool_vm_ops;
	else if (range->longterm)
		vma->vm_ops = &vmem_longterm_vm_ops;
	else
		vma->vm_ops = &vmem_region_vm_ops;
	vma->vm_private_data = range;	/* the reference goes with it */
	return 0;
}

/* Files */

static int vmem_open(struct inode *inode, struct file *file)
{
	struct vmem_ctx *ctx;
	int i;

	/* Shared mappings need both. */
	if ((file->f_mode & (FMODE_READ | FMODE_WRITE)) != (FMODE_READ | FMODE_WRITE))
		return -EACCES;
	ctx = kzalloc(sizeof(*ctx), GFP_KERNEL_ACCOUNT);
	if (!ctx)
		return -ENOMEM;
	ctx->inode = alloc_anon_inode(vmem_mnt->mnt_sb);
	if (IS_ERR(ctx->inode)) {
		i = PTR_ERR(ctx->inode);
		kfree(ctx);
		return i;
	}
	/* The kernel maps nothing as huge that reaches beyond the file's end. */
	i_size_write(ctx->inode, MAX_LFS_FILESIZE);
	spin_lock_init(&ctx->lock);
	mt_init_flags(&ctx->ranges, MT_FLAGS_USE_RCU);	/* vmem_range_find() reads without its lock */
	xa_init_flags(&ctx->pins, XA_FLAGS_ALLOC1 | XA_FLAGS_ACCOUNT);
	init_waitqueue_head(&ctx->event_wq);
	for (i = 0; i < VMEM_QUEUES; i++)
		init_waitqueue_head(&ctx->fault_wq[i]);
	INIT_LIST_HEAD(&ctx->events);
	ctx->owner = get_pid(task_tgid(current));
	ctx->knobs_seen = atomic_read(&vmem_knobs_seq);
	ctx->next_pgoff = PMD_SIZE >> PAGE_SHIFT;	/* offset 0 is nobody's name */

	file->private_data = ctx;
	file->f_mapping = ctx->inode->i_mapping;
	spin_lock(&vmem_ctx_list_lock);
	list_add_tail(&ctx->link, &vmem_ctx_list);
	spin_unlock(&vmem_ctx_list_lock);
	vmem_count(vmem_c_contexts);
	return nonseekable_open(inode, file);
}

/* Parked threads find the context dead and get SIGBUS; what is present stays so. */
void vmem_ctx_kill(struct vmem_ctx *ctx)
{
	int i;

	spin_lock(&ctx->lock);
	ctx->dead = true;
	spin_unlock(&ctx->lock);
	for (i = 0; i < VMEM_QUEUES; i++)
		wake_up_all(&ctx->fault_wq[i]);
	wake_up_all(&ctx->event_wq);
}

/*
 * Each close(2), the one at exit included. Mappings hold the file, so ->release
 * would come too late for whoever waits in one of them, in another process or for
 * the GPU: when the process that opened closes, nobody will answer any more.
 */
static int vmem_flush(struct file *file, fl_owner_t id)
{
	struct vmem_ctx *ctx = file->private_data;

	if (task_tgid(current) == ctx->owner)
		vmem_ctx_kill(ctx);
	return 0;
}

/* No mapping, parked thread or call is left: each holds the file. */
static int vmem_file_release(struct inode *inode, struct file *file)
{
	struct vmem_ctx *ctx = file->private_data;
	struct vmem_range *range;
	unsigned long index;
	int kind;

	spin_lock(&vmem_ctx_list_lock);
	list_del(&ctx->link);
	spin_unlock(&vmem_ctx_list_lock);
	vmem_unpin_all(ctx);
	/* Regions first: they hand their frames back to the pools. */
	for (kind = VMEM_KIND_REGION; kind >= VMEM_KIND_POOL; kind--) {
		index = 0;
		mt_for_each(&ctx->ranges, range, index, ULONG_MAX) {
			if (range->kind != kind)
				continue;
			range->dead = true;
			vmem_range_end(range);
		}
	}
	mtree_destroy(&ctx->ranges);
	if (ctx->eventfd)
		eventfd_ctx_put(ctx->eventfd);
	iput(ctx->inode);
	put_pid(ctx->owner);
	kfree(ctx);
	vmem_add(vmem_c_contexts, -1);
	return 0;
}

/* Calls */

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
	if (READ_ONCE(vmem_knobs.trap_enabled))
		arg->features |= VMEM_FEATURE_TRAP;
	if (IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE))
		arg->features |= VMEM_FEATURE_HUGE;
	arg->unit_min = VMEM_UNIT_MIN;
	arg->unit_max = VMEM_UNIT_MAX;
	arg->batch_max = VMEM_BATCH_MAX;
	if (arg->need & ~arg->features)
		return -EOPNOTSUPP;
	WRITE_ONCE(ctx->ready, true);
	return 0;
}

static int vmem_info(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_info *arg = argument;
	arg->frame_limit = READ_ONCE(vmem_knobs.frame_limit_bytes);
	arg->context_limit = READ_ONCE(vmem_knobs.context_limit_bytes);
	arg->readahead_bytes = READ_ONCE(vmem_knobs.readahead_bytes);
	arg->fault_timeout_ms = READ_ONCE(vmem_knobs.fault_timeout_ms);
	arg->watermark_low = READ_ONCE(vmem_knobs.watermark_low_percent);
	arg->watermark_high = READ_ONCE(vmem_knobs.watermark_high_percent);
	arg->frame_order = READ_ONCE(vmem_knobs.frame_order);
	arg->pinned_bytes = atomic64_read(&ctx->pinned_bytes);
	spin_lock(&ctx->lock);
	arg->frame_bytes = ctx->frame_bytes;
	arg->installed_bytes = ctx->installed_bytes;
	arg->asked_bytes = ctx->asked_bytes;
	spin_unlock(&ctx->lock);
	return 0;
}

static int vmem_shutdown(struct vmem_ctx *ctx, void *arg)
{
	vmem_ctx_kill(ctx);
	return 0;
}

/* Size of a call's argument, and who takes a pointer to it. */
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

/*
 * Copies in, calls, copies out; no lock is held over either copy, since the memory
 * may lie in a region of this very context and fault.
 */
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

const struct file_operations vmem_fops = {
	.owner = THIS_MODULE,
	.open = vmem_open,
	.flush = vmem_flush,
	.release = vmem_file_release,
	.mmap = vmem_mmap,
	/* Addresses that let 2 MiB frames map as one entry. */
	.get_unmapped_area = thp_get_unmapped_area,
	.unlocked_ioctl = vmem_ioctl,
	.compat_ioctl = vmem_ioctl,
	.read = vmem_read,
	.poll = vmem_poll,
	.llseek = noop_llseek,
};
