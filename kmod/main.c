// SPDX-License-Identifier: GPL-2.0-only
/*
 * main.c - vmem.ko: frames, traps and events for libvmem
 *
 * The module keeps memory, catches touches of absent blocks and tells the runtime
 * about them. It never does disk I/O and never calls another driver.
 */

#include <linux/miscdevice.h>
#include <linux/module.h>

#include "vmem.h"

static unsigned long frame_limit_mib;
module_param(frame_limit_mib, ulong, 0444);
MODULE_PARM_DESC(frame_limit_mib,
		 "Initial frame_limit_bytes in MiB: most frame memory of all contexts (default 0: half of RAM)");

static unsigned int fault_timeout_ms;
module_param(fault_timeout_ms, uint, 0444);
MODULE_PARM_DESC(fault_timeout_ms,
		 "Initial fault_timeout_ms: how long a touch waits for the runtime before SIGBUS (default 0: 30000)");

static struct miscdevice vmem_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = VMEM_DEVICE_NAME,
	.fops = &vmem_fops,
	.groups = vmem_groups,
	/* The owner only; the udev rule opens it to the group vmem. */
	.mode = 0600,
};

static int __init vmem_init(void)
{
	int err;

	BUILD_BUG_ON(BITS_PER_LONG != 64);
	BUILD_BUG_ON(sizeof(struct vmem_hello) != 40);
	BUILD_BUG_ON(sizeof(struct vmem_create) != 32);
	BUILD_BUG_ON(sizeof(struct vmem_op) != 32);
	BUILD_BUG_ON(sizeof(struct vmem_event) != 40);
	BUILD_BUG_ON(sizeof(struct vmem_info) != 72);

	vmem_knobs.frame_limit_bytes = (u64)totalram_pages() * PAGE_SIZE / 2;
	if (frame_limit_mib)
		vmem_knobs.frame_limit_bytes = (u64)frame_limit_mib << 20;
	if (fault_timeout_ms)
		vmem_knobs.fault_timeout_ms = clamp(fault_timeout_ms, 100U, 3600000U);

	err = vmem_context_init();
	if (err)
		return err;
	err = vmem_pressure_init();
	if (err)
		goto err_context;
	err = vmem_sysfs_init();
	if (err)
		goto err_pressure;
	err = misc_register(&vmem_misc);
	if (err)
		goto err_sysfs;
	return 0;

err_sysfs:
	vmem_sysfs_exit();
err_pressure:
	vmem_pressure_exit();
err_context:
	vmem_context_exit();
	return err;
}

/* Runs only when no file is open: each pins the module. */
static void __exit vmem_exit(void)
{
	misc_deregister(&vmem_misc);
	vmem_sysfs_exit();
	vmem_pressure_exit();
	vmem_context_exit();
}

module_init(vmem_init);
module_exit(vmem_exit);

MODULE_DESCRIPTION("Frames, traps and fault events for libvmem");
MODULE_LICENSE("GPL");
MODULE_VERSION("1.0");
