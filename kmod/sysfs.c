// SPDX-License-Identifier: GPL-2.0-only
/*
 * sysfs.c - /sys/class/misc/vmem/: one value per file; docs/kernel-module.md has a row for each
 * A changed knob is announced twice: by poll(2) on its file, and by an event to every context.
 */

#include <linux/kstrtox.h>
#include <linux/sysfs.h>

#include "vmem.h"

struct vmem_file *vmem_node_files;
atomic_t vmem_knobs_seq = ATOMIC_INIT(0);

static ssize_t vmem_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lld\n",
			  atomic64_read(&container_of(attr, struct vmem_file, attr)->value));
}

/* Returns 1: changed; 0: it was so already; or an error of the value. Needs vmem_ctx_list_lock. */
static int vmem_knob_set(struct vmem_file *knob, u64 value)
{
	struct vmem_ctx *ctx;

	if (value < knob->min || value > knob->max)
		return -ERANGE;
	if ((knob == &vmem_files[vmem_watermark_low_percent] &&
	     value > vmem_get(vmem_watermark_high_percent)) ||
	    (knob == &vmem_files[vmem_watermark_high_percent] &&
	     value < vmem_get(vmem_watermark_low_percent)))
		return -EINVAL;
	if (atomic64_xchg(&knob->value, value) == value)
		return 0;
	atomic_inc(&vmem_knobs_seq);
	list_for_each_entry(ctx, &vmem_ctx_list, link) {
		vmem_lock(ctx);
		vmem_notify(ctx);
		vmem_unlock(ctx);
		cond_resched();
	}
	return 1;
}

static ssize_t vmem_store(struct device *dev, struct device_attribute *attr, const char *buf,
			  size_t size)
{
	u64 value;
	int ret = kstrtou64(buf, 0, &value);

	if (ret)
		return ret;
	mutex_lock(&vmem_ctx_list_lock);
	ret = vmem_knob_set(container_of(attr, struct vmem_file, attr), value);
	mutex_unlock(&vmem_ctx_list_lock);
	if (ret > 0)
		sysfs_notify(&dev->kobj, NULL, attr->attr.name);
	return ret < 0 ? ret : size;
}

#define KNOB(id, low, high, first)						\
	[vmem_##id] = { .attr = __ATTR(id, 0644, vmem_show, vmem_store),	\
			.value = ATOMIC64_INIT(first), .min = (low), .max = (high) }
#define COUNTER(id)								\
	[vmem_##id] = { .attr = __ATTR(id, 0444, vmem_show, NULL) }

struct vmem_file vmem_files[vmem_values_end] = {
	/* A limit of 0 limits nothing; vmem_init() sets the first to half of RAM. */
	KNOB(frame_limit_bytes, 0, BIT_ULL(50), 0),
	KNOB(context_limit_bytes, 0, BIT_ULL(50), 0),
	KNOB(readahead_bytes, 0, 4LL << 30, 64 << 20),
	KNOB(fault_timeout_ms, 100, 3600000, 30000),
	KNOB(watermark_low_percent, 0, 50, 5),
	KNOB(watermark_high_percent, 0, 90, 10),
	KNOB(frame_order, 0, PMD_SHIFT - PAGE_SHIFT, PMD_SHIFT - PAGE_SHIFT),
	KNOB(trap_enabled, 0, 1, 1),
	KNOB(user_limit_bytes, 0, BIT_ULL(50), 0),
	KNOB(user_limit_records, 0, BIT_ULL(40), 0),
	KNOB(pressure_percent, 0, 101, 10),
	COUNTER(contexts), COUNTER(regions), COUNTER(frame_bytes), COUNTER(installed_bytes),
	COUNTER(pinned_bytes), COUNTER(scattered_frames), COUNTER(faults_read),
	COUNTER(faults_write), COUNTER(faults_protected), COUNTER(faults_remote),
	COUNTER(events), COUNTER(waits), COUNTER(timeouts), COUNTER(sigbus),
	COUNTER(refused_pinned), COUNTER(refused_limit), COUNTER(pressure_requests),
	COUNTER(pressure_unanswered), COUNTER(broken_bytes), COUNTER(left_bytes), COUNTER(records),
};

static struct attribute_group vmem_group;
const struct attribute_group *vmem_groups[] = { &vmem_group, NULL };

int vmem_sysfs_init(void)
{
	struct attribute **attrs;
	int i, node;

	attrs = kcalloc(vmem_values_end + nr_node_ids + 1, sizeof(*attrs), GFP_KERNEL);
	vmem_node_files = kcalloc(nr_node_ids, sizeof(*vmem_node_files), GFP_KERNEL);
	vmem_group.attrs = attrs;
	if (!attrs || !vmem_node_files)
		return -ENOMEM;
	for (i = 0; i < vmem_values_end; i++)
		*attrs++ = &vmem_files[i].attr.attr;
	for_each_node(node) {
		struct vmem_file *file = &vmem_node_files[node];

		snprintf(file->name, sizeof(file->name), "node%d_frame_bytes", node);
		sysfs_attr_init(&file->attr.attr);
		file->attr.attr.name = file->name;
		file->attr.attr.mode = 0444;
		file->attr.show = vmem_show;
		*attrs++ = &file->attr.attr;
	}
	return 0;
}

void vmem_sysfs_exit(void)
{
	kfree(vmem_node_files);
	kfree(vmem_group.attrs);
}
