// SPDX-License-Identifier: GPL-2.0-only
/*
 * pin.c - long-term pins of the caller's own buffers
 */

#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>
#include <linux/slab.h>

#include "vmem.h"

#define VMEM_PIN_MAX	(1UL << 30)
#define VMEM_PIN_STEP	512	/* pages between looks at signals */

struct vmem_pinned {
	struct user_struct *user;
	unsigned long pages;	/* pinned and, but for @free_of_charge, charged */
	bool write;
	bool free_of_charge;
	struct page *page[];
};

static bool vmem_lock_charge(struct vmem_pinned *pinned, unsigned long pages)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;

	if (capable(CAP_IPC_LOCK)) {
		pinned->free_of_charge = true;
		return true;
	}
	if (atomic_long_add_return(pages, &pinned->user->locked_vm) <= limit)
		return true;
	atomic_long_sub(pages, &pinned->user->locked_vm);
	return false;
}

static void vmem_pin_free(struct vmem_pinned *pinned, unsigned long charged)
{
	if (pinned->write)
		unpin_user_pages_dirty_lock(pinned->page, pinned->pages, true);
	else
		unpin_user_pages(pinned->page, pinned->pages);
	if (!pinned->free_of_charge)
		atomic_long_sub(charged, &pinned->user->locked_vm);
	free_uid(pinned->user);
	kvfree(pinned);
}

int vmem_pin(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_pin *arg = argument;
	unsigned int gup = FOLL_LONGTERM | (arg->flags & VMEM_PIN_WRITE ? FOLL_WRITE : 0);
	unsigned long i, pages = arg->size >> PAGE_SHIFT;
	struct vmem_pinned *pinned;
	int err;

	if (arg->pad || arg->flags & ~VMEM_PIN_WRITE)
		return -EINVAL;
	if (!arg->size || arg->size > VMEM_PIN_MAX || (arg->address | arg->size) & ~PAGE_MASK)
		return -EINVAL;
	if (arg->address + arg->size < arg->address)
		return -ERANGE;
	pinned = kvzalloc(struct_size(pinned, page, pages), GFP_KERNEL_ACCOUNT);
	if (!pinned)
		return -ENOMEM;
	pinned->write = arg->flags & VMEM_PIN_WRITE;
	pinned->user = get_uid(current_user());
	if (!vmem_lock_charge(pinned, pages)) {
		pinned->free_of_charge = true;
		err = -ENOMEM;
		goto err_free;
	}
	while (pinned->pages < pages) {
		int n = min_t(unsigned long, pages - pinned->pages, VMEM_PIN_STEP);

		n = pin_user_pages_fast(arg->address + (pinned->pages << PAGE_SHIFT), n, gup,
					pinned->page + pinned->pages);
		err = n < 0 ? n : n == 0 ? -EFAULT : fatal_signal_pending(current) ? -EINTR : 0;
		pinned->pages += max(n, 0);
		if (err)
			goto err_free;
		cond_resched();
	}
	arg->runs = 1;
	for (i = 1; i < pages; i++)
		arg->runs += page_to_pfn(pinned->page[i]) != page_to_pfn(pinned->page[i - 1]) + 1;
	err = xa_alloc(&ctx->pins, &arg->id, pinned, xa_limit_31b, GFP_KERNEL_ACCOUNT);
	if (err)
		goto err_free;
	atomic64_add(arg->size, &ctx->pinned_bytes);
	vmem_add(vmem_c_pinned_bytes, arg->size);
	return 0;

err_free:
	vmem_pin_free(pinned, pages);
	return err;
}

static void vmem_pin_end(struct vmem_ctx *ctx, struct vmem_pinned *pinned)
{
	s64 bytes = (s64)pinned->pages << PAGE_SHIFT;

	atomic64_sub(bytes, &ctx->pinned_bytes);
	vmem_add(vmem_c_pinned_bytes, -bytes);
	vmem_pin_free(pinned, pinned->pages);
}

int vmem_unpin(struct vmem_ctx *ctx, void *argument)
{
	struct vmem_unpin *arg = argument;
	struct vmem_pinned *pinned;

	if (arg->pad)
		return -EINVAL;
	pinned = xa_erase(&ctx->pins, arg->id);
	if (!pinned)
		return -ENOENT;
	vmem_pin_end(ctx, pinned);
	return 0;
}

void vmem_unpin_all(struct vmem_ctx *ctx)
{
	struct vmem_pinned *pinned;
	unsigned long id;

	xa_for_each(&ctx->pins, id, pinned)
		vmem_pin_end(ctx, pinned);
	xa_destroy(&ctx->pins);
}
