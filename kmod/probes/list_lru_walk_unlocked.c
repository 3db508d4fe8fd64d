// SPDX-License-Identifier: GPL-2.0-only
/* 6.13: list_lru_walk_one() does not pass the lock to its callback. */
#include <linux/mm.h>
#include <linux/list_lru.h>

list_lru_walk_cb probe(void);
static enum lru_status visit(struct list_head *item, struct list_lru_one *list, void *arg)
{
	return LRU_ROTATE;
}

list_lru_walk_cb probe(void)
{
	return visit;
}
