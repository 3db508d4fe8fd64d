// SPDX-License-Identifier: GPL-2.0-only
/* 6.8: eventfd_signal() lost its count. */
#include <linux/eventfd.h>

void probe(struct eventfd_ctx *eventfd);
void probe(struct eventfd_ctx *eventfd)
{
	eventfd_signal(eventfd);
}
