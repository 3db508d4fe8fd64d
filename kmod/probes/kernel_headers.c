// SPDX-License-Identifier: GPL-2.0-only
/* Asks for nothing: if it does not compile, nothing is known of this kernel. */
#include <linux/eventfd.h>
#include <linux/mm.h>
#include <linux/list_lru.h>
#include <linux/shrinker.h>

void probe(void);
void probe(void)
{
}
