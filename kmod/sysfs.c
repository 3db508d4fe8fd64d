// SPDX-License-Identifier: GPL-2.0-only
/*
 * sysfs.c - /sys/class/misc/vmem/: one value a file; docs/sysfs.md has a row for each
 *
 * A changed knob is told in two ways: poll(2) on its file, and an event to every
 * context.
 */

#include <linux/device.h>
#include <linux/kstrtox.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "vmem.h"

#define VMEM_KNOB_VALUE(name, low, high, first) .name = (first),
struct vmem_knobs vmem_knobs = { VMEM_KNOBS(VMEM_KNOB_VALUE) };
atomic_t vmem_knobs_seq = ATOMIC_INIT(0);
atomic64_t vmem_counters[vmem_counters_end];
atomic64_t vmem_node_bytes[MAX_NUMNODES];

struct vmem_knob_attr {
	struct device_attribute attr;
	u64 *value;
	u64 min;
	u64 max;
};

static DEFINE_MUTEX(vmem_knob_mutex);	/* one store at a time: low stays below high */

static ssize_t vmem_knob_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct vmem_knob_attr *knob = container_of(attr, struct vmem_knob_attr, attr);

	return sysfs_emit(buf, "%llu\n", READ_ONCE(*knob->value));
}

static int vmem_knob_set(struct vmem_knob_attr *knob, u64 value)
{
	struct vmem_ctx *ctx;

	lockdep_assert_held(&vmem_knob_mutex);
	if (value < knob->min || value > knob->max)
		return -ERANGE;
	if (knob->value == &vmem_knobs.watermark_low_percent && value > vmem_knobs.watermark_high_percent)
		return -EINVAL;
	if (knob->value == &vmem_knobs.watermark_high_percent && value < vmem_knobs.watermark_low_percent)
		return -EINVAL;
	if (*knob->value == value)
		return 0;
	WRITE_ONCE(*knob->value, value);
	atomic_inc(&vmem_knobs_seq);
	spin_lock(&vmem_ctx_list_lock);
	list_for_each_entry(ctx, &vmem_ctx_list, link) {
		spin_lock(&ctx->lock);
		vmem_notify(ctx);
		spin_unlock(&ctx->lock);
	}
	spin_unlock(&vmem_ctx_list_lock);
	return 1;
}

static ssize_t vmem_knob_store(struct device *dev, struct device_attribute *attr, const char *buf,
			       size_t size)
{
	struct vmem_knob_attr *knob = container_of(attr, struct vmem_knob_attr, attr);
	u64 value;
	int ret;

	ret = kstrtou64(buf, 0, &value);
	if (ret)
		return ret;
	mutex_lock(&vmem_knob_mutex);
	ret = vmem_knob_set(knob, value);
	mutex_unlock(&vmem_knob_mutex);
	if (ret > 0)
		sysfs_notify(&dev->kobj, NULL, attr->attr.name);
	return ret < 0 ? ret : size;
}

#define VMEM_KNOB_ATTR(file, low, high, first)					\
	static struct vmem_knob_attr vmem_knob_##file = {			\
		.attr = __ATTR(file, 0644, vmem_knob_show, vmem_knob_store),	\
		.value = &vmem_knobs.file, .min = low, .max = high,		\
	};
VMEM_KNOBS(VMEM_KNOB_ATTR)

static ssize_t vmem_counter_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct dev_ext_attribute *counter = container_of(attr, struct dev_ext_attribute, attr);

	return sysfs_emit(buf, "%lld\n", atomic64_read((atomic64_t *)counter->var));
}

#define VMEM_COUNTER_ATTR(file)							\
	static struct dev_ext_attribute vmem_counter_##file = {			\
		.attr = __ATTR(file, 0444, vmem_counter_show, NULL),		\
		.var = &vmem_counters[vmem_c_##file],				\
	};
VMEM_COUNTERS(VMEM_COUNTER_ATTR)

#define VMEM_KNOB_LIST(file, low, high, first) &vmem_knob_##file.attr.attr,
#define VMEM_COUNTER_LIST(file) &vmem_counter_##file.attr.attr,
static struct attribute *vmem_attrs[] = {
	VMEM_KNOBS(VMEM_KNOB_LIST)
	VMEM_COUNTERS(VMEM_COUNTER_LIST)
	NULL,
};

static const struct attribute_group vmem_group = { .attrs = vmem_attrs };

/* nodeN_frame_bytes, a file for each node there may be: made at load. */
static struct attribute_group vmem_node_group;

const struct attribute_group *vmem_groups[] = {
	&vmem_group,
	&vmem_node_group,
	NULL,
};

int vmem_sysfs_init(void)
{
	struct dev_ext_attribute *counter;
	int node, n = 0;

	vmem_node_group.attrs = kcalloc(nr_node_ids + 1, sizeof(struct attribute *), GFP_KERNEL);
	if (!vmem_node_group.attrs)
		return -ENOMEM;
	for_each_node(node) {
		counter = kzalloc(sizeof(*counter), GFP_KERNEL);
		if (!counter)
			goto err_free;
		sysfs_attr_init(&counter->attr.attr);
		vmem_node_group.attrs[n++] = &counter->attr.attr;
		counter->attr.attr.name = kasprintf(GFP_KERNEL, "node%d_frame_bytes", node);
		if (!counter->attr.attr.name)
			goto err_free;
		counter->attr.attr.mode = 0444;
		counter->attr.show = vmem_counter_show;
		counter->var = &vmem_node_bytes[node];
	}
	return 0;

err_free:
	vmem_sysfs_exit();
	return -ENOMEM;
}

void vmem_sysfs_exit(void)
{
	struct attribute **attr;

	for (attr = vmem_node_group.attrs; *attr; attr++) {
		kfree((*attr)->name);
		kfree(container_of(*attr, struct dev_ext_attribute, attr.attr));
	}
	kfree(vmem_node_group.attrs);
}
