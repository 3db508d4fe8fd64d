// SPDX-License-Identifier: GPL-2.0-only
/* 6.8: the call that finds an item's memory cgroup and node itself has a name of its own. */
#include <linux/mm.h>
#include <linux/list_lru.h>

bool probe(struct list_lru *lru, struct list_head *item);
bool probe(struct list_lru *lru, struct list_head *item)
{
	return list_lru_add_obj(lru, item);
}
