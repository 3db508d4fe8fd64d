// SPDX-License-Identifier: GPL-2.0-only
/* 6.10: folio_mapcount() is inline and reads one counter. */
#include <linux/mm.h>

int probe(struct folio *folio);
int probe(struct folio *folio)
{
	return folio_large_mapcount(folio);
}
