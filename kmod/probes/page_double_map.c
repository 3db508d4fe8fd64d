// SPDX-License-Identifier: GPL-2.0-only
/* Up to 6.1: the small counts of a file folio include the entire count. */
#include <linux/mm.h>

int probe(struct page *page);
int probe(struct page *page)
{
	return PageDoubleMap(page);
}
