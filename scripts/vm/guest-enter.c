/* SPDX-License-Identifier: Apache-2.0 */
/*
 * guest-enter [-u UID] [-c] -- PROGRAM ARGS: runs a program in a test guest as the given user.
 *
 * -u UID  becomes that user and group, without supplementary groups. An ordinary login's limits apply: 8 MiB of locked
 *         memory, 1024 open files (hard 524288).
 * -c      imitates a container under Docker's default seccomp profile: io_uring and userfaultfd fail with EPERM
 *         (https://docs.docker.com/engine/security/seccomp/), and there are no new privileges.
 * Linked statically, because no libraries may be present yet. Exit 125: setup failed; 127: the program cannot run.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DENY(nr) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (nr), 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)

static void fail(const char *what)
{
	fprintf(stderr, "guest-enter: %s: %s\n", what, strerror(errno));
	exit(125);
}

static void deny_as_docker(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		DENY(SYS_io_uring_setup),
		DENY(SYS_io_uring_enter),
		DENY(SYS_io_uring_register),
		DENY(SYS_userfaultfd),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {.len = sizeof(code) / sizeof(code[0]), .filter = code};

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		fail("no_new_privs");
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program))
		fail("seccomp");
}

int main(int argc, char **argv)
{
	const struct rlimit locked = {8 << 20, 8 << 20}, files = {1024, 524288};
	unsigned long uid = 0;
	int container = 0, opt;

	while ((opt = getopt(argc, argv, "+u:c")) != -1) {
		if (opt == 'u')
			uid = strtoul(optarg, NULL, 10);
		else if (opt == 'c')
			container = 1;
		else
			return 125;
	}
	if (optind >= argc) {
		fprintf(stderr, "guest-enter: no program given\n");
		return 125;
	}
	if (setrlimit(RLIMIT_NOFILE, &files))
		fail("open files limit");
	if (uid) {
		if (setrlimit(RLIMIT_MEMLOCK, &locked))
			fail("locked memory limit");
		if (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))
			fail("change of user");
	}
	if (container)
		deny_as_docker();
	execvp(argv[optind], argv + optind);
	fprintf(stderr, "guest-enter: %s: %s\n", argv[optind], strerror(errno));
	return 127;
}
