/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * point.h - for the race tests only (make VMEM_DELAY=y): now and then calls sleep where they could
 * be overtaken, for up to the parameter delay_us. Included once, by context.c.
 */
#include <linux/delay.h>
#include <linux/random.h>

static unsigned int delay_us;
module_param(delay_us, uint, 0644);
MODULE_PARM_DESC(delay_us, "Longest sleep at a point where calls race (0: none)");

void vmem_point(void)
{
	u32 random = get_random_u32();

	if (delay_us && random % 4 == 0)
		usleep_range(random / 4 % delay_us, random / 4 % delay_us + 50);
}
