/* SPDX-License-Identifier: GPL-2.0-only */
/* peek.h - the interface of /dev/vmem-peek: see peek.c */
#ifndef VMEM_TESTS_PEEK_H
#define VMEM_TESTS_PEEK_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define PEEK_LONG_PIN 1      /* pinned for long, as for VFIO; else a plain reference */
#define PEEK_WITH_NOTIFIER 2 /* the process has an mmu notifier during the call */
#define PEEK_LETS_GO 4       /* drops mmap_lock after each fault, as a device does, and retries */

struct peek {
  __u64 address; /* in: address of a word */
  __u64 value;   /* out: the word */
  __u64 held_us; /* out: how long mmap_lock was held, or with PEEK_LETS_GO: waited for */
  __u32 how;     /* in: PEEK_LONG_PIN, PEEK_WITH_NOTIFIER, PEEK_LETS_GO */
  __s32 result;  /* out: 0 or a negative errno */
};

#define PEEK _IOWR(0xF6, 0, struct peek)

#endif
