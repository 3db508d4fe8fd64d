// SPDX-License-Identifier: GPL-2.0-only
/* Uses nothing: if it does not compile, the headers of this kernel do not compile. */
#include <linux/eventfd.h>
#include <linux/mm.h>
#include <linux/list_lru.h>
#include <linux/shrinker.h>

void probe(void);
void probe(void)
{
}
