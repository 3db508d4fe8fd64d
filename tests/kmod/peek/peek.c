// SPDX-License-Identifier: GPL-2.0-only
/*
 * peek.c - for the tests only: a kernel thread that reads a page of the caller's memory
 * It acts like a driver that cannot drop mmap_lock: get_user_pages_remote() that may not retry. It
 * reports the result, and how long it held the lock. With a notifier the process looks as if it had
 * a virtual machine or a GPU. With PEEK_LETS_GO it acts like a fault of a device through HMM or an
 * IOMMU, which drops the lock after each try.
 */
#include <linux/highmem.h>
#include <linux/kthread.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/module.h>
#include <linux/sched/task.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "peek.h"

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 5, 0)
#define PEEK_NO_VMAS	NULL,
#else
#define PEEK_NO_VMAS
#endif

struct peek_work {
	struct peek *arg;
	struct mm_struct *mm;
	struct completion done;
};

/* Returns when the page is there, or an error. Takes the lock anew for each fault. */
static long peek_letting_go(struct mm_struct *mm, u64 address, struct page **page)
{
	for (;;) {
		vm_fault_t fault = VM_FAULT_SIGBUS;
		struct vm_area_struct *vma;
		long got;

		mmap_read_lock(mm);
		got = get_user_pages_remote(mm, address, 1, FOLL_NOWAIT, page, PEEK_NO_VMAS NULL);
		vma = find_vma(mm, address);
		if (got != 1 && vma && vma->vm_start <= address)
			fault = handle_mm_fault(vma, address, FAULT_FLAG_REMOTE, NULL);
		mmap_read_unlock(mm);
		if (got == 1)
			return 1;
		if (fault & VM_FAULT_ERROR)
			return -EFAULT;
		cond_resched();
	}
}

static int peek_thread(void *argument)
{
	struct peek_work *work = argument;
	struct peek *arg = work->arg;
	struct page *page = NULL;
	ktime_t start;
	long got;

	start = ktime_get();
	if (arg->how & PEEK_LETS_GO) {
		got = peek_letting_go(work->mm, arg->address, &page);
		arg->held_us = ktime_us_delta(ktime_get(), start);
		goto done;
	}
	mmap_read_lock(work->mm);
	start = ktime_get();
	if (arg->how & PEEK_LONG_PIN)
		got = pin_user_pages_remote(work->mm, arg->address, 1, FOLL_LONGTERM, &page,
					    PEEK_NO_VMAS NULL);
	else
		got = get_user_pages_remote(work->mm, arg->address, 1, 0, &page, PEEK_NO_VMAS NULL);
	arg->held_us = ktime_us_delta(ktime_get(), start);
	mmap_read_unlock(work->mm);
done:
	arg->result = got == 1 ? 0 : got ? got : -EAGAIN;
	if (got == 1) {
		void *from = kmap_local_page(page);

		arg->value = *(u64 *)(from + offset_in_page(arg->address));
		kunmap_local(from);
		if (arg->how & PEEK_LONG_PIN)
			unpin_user_page(page);
		else
			put_page(page);
	}
	complete(&work->done);
	return 0;
}

static const struct mmu_notifier_ops peek_notifier_ops = {};

static long peek_ioctl(struct file *file, unsigned int cmd, unsigned long uarg)
{
	struct mmu_notifier notifier = { .ops = &peek_notifier_ops };
	struct peek arg;
	struct peek_work work = { .arg = &arg, .mm = current->mm };
	struct task_struct *thread;
	int err = 0;

	if (cmd != PEEK)
		return -ENOTTY;
	if (copy_from_user(&arg, (void __user *)uarg, sizeof(arg)))
		return -EFAULT;
	init_completion(&work.done);
	if (arg.how & PEEK_WITH_NOTIFIER)
		err = mmu_notifier_register(&notifier, current->mm);
	if (err)
		return err;
	thread = kthread_create(peek_thread, &work, "peek");
	err = PTR_ERR_OR_ZERO(thread);
	if (!err) {
		get_task_struct(thread);
		wake_up_process(thread);
		wait_for_completion(&work.done);	/* the test checks that this returns */
		kthread_stop(thread);
		put_task_struct(thread);
	}
	if (arg.how & PEEK_WITH_NOTIFIER)
		mmu_notifier_unregister(&notifier, current->mm);
	return err ?: copy_to_user((void __user *)uarg, &arg, sizeof(arg)) ? -EFAULT : 0;
}

static const struct file_operations peek_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = peek_ioctl,
};

static struct miscdevice peek_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "vmem-peek",
	.fops = &peek_fops,
	.mode = 0666,
};
module_misc_device(peek_misc);

MODULE_DESCRIPTION("A kernel thread that reads its caller's memory, for the tests of vmem.ko");
MODULE_LICENSE("GPL");
