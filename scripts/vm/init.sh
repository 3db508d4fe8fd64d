#!/bin/busybox sh
# shellcheck shell=dash
# The first process of a test guest. It sets up the machine, runs /plan (written by run-guest.sh),
# checks the kernel's log, and exits with a verdict.
#
# ttyS0 is the console: live test output among the kernel's own lines. ttyS1 carries only results,
# so that no kernel message splits one: lines that begin with @@, and each test's JSON.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp TERM=dumb
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm /tmp /data
mount -t devpts devpts /dev/pts 2>/dev/null
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null
exec </dev/null >/dev/ttyS0 2>&1

say() { echo "$*" >/dev/ttyS1; }
. /config   # FS KMEMLEAK COMMAND_TIMEOUT
read -r up idle </proc/uptime
say "@@USERLAND $up $(uname -r)"
echo "@@USERLAND $up $(uname -r)"

# Reports the verdict and powers off. QEMU's own exits are 0 and 1, and a panic also exits with 0:
# 33 means "passed".
leave() {
  say "@@VERDICT $1"
  sleep 0.3   # the serial lines drain at their own pace, and the port below stops QEMU at once
  printf "\\x$(printf %x $(($1 + 16)))" | dd of=/dev/port bs=1 seek=244 count=1 conv=notrunc 2>/dev/null
  sleep 1
  poweroff -f
}
setup_failed() { say "@@SETUP $*"; leave 98; }

ip link set lo up 2>/dev/null
echo madvise >/sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null
echo madvise >/sys/kernel/mm/transparent_hugepage/defrag 2>/dev/null
[ -f /modules.order ] && while read -r m; do insmod "/modules/$m" || setup_failed "insmod $m"; done </modules.order

if [ "$FS" != none ]; then
  i=0; while [ ! -b /dev/vdb ] && [ $i -lt 200 ]; do sleep 0.05; i=$((i + 1)); done
  [ -b /dev/vdb ] || setup_failed "no second virtio drive after 10 s: a debug kernel that is older than its configuration has none"
  # Drives are probed in parallel, so their names may swap: the one with a file system is the data
  # disk.
  disk=/dev/vda raw=/dev/vdb
  mount -t "$FS" "$disk" /data 2>/dev/null || { disk=/dev/vdb raw=/dev/vda; mount -t "$FS" "$disk" /data; } ||
    setup_failed "mount -t $FS"
  chmod 666 "$raw"
  export VMEM_TEST_BLOCK_DEVICE=$raw
fi
chmod 1777 /data
export TMPDIR=/data VMEM_TEST_DIR=/data

# Prints the kernel stacks of each thread of a program that does not end.
stacks() {
  echo "@@OVERDUE after $COMMAND_TIMEOUT s; its threads:"
  for task in /proc/"$1"/task/*; do
    echo "thread ${task##*/} $(cat "$task/comm") state $(sed -n 's/^State:.//p' "$task/status"): $(sed 's/^[^ ]* //; s/+.*//' "$task/stack" | tr '\n' ' ')"
  done
}

worst=0
# run NUMBER USER CONTAINER(0|1) PROGRAM ARGS..: one test. Its result travels as @@RESULT NUMBER STATUS, JSON, @@END.
run() {
  number=$1 user=$2 flag=; [ "$3" = 1 ] && flag=-c; shift 3
  case $user in root) uid=0 ;; nobody) uid=65534 ;; *) uid=$user ;; esac
  json=/tmp/result-$number.json   # the plan tells GoogleTest programs to write it
  echo "@@START $number"
  # Its own session, so that a timeout also ends the processes that the program started.
  # shellcheck disable=SC2086
  (cd /data && exec setsid guest-enter -u $uid $flag -- "$@") &
  pid=$!
  (sleep "$COMMAND_TIMEOUT"; echo overdue >/tmp/overdue-$number; stacks $pid; kill -9 -$pid) &
  watch=$!
  wait $pid; status=$?
  kill $watch 2>/dev/null
  [ -f /tmp/overdue-$number ] && status=124
  echo "@@STOP $number $status"
  say "@@RESULT $number $status"
  [ -f "$json" ] && cat "$json" >/dev/ttyS1
  say "@@END $number"
  [ $status = 0 ] || [ $status = 77 ] || worst=1
}

load=; for m in /load/*; do [ -e "$m" ] && load=1; done
if [ -n "$load" ]; then
  while read -r kind m args; do
    # shellcheck disable=SC2086
    insmod "/load/$m" $args || setup_failed "insmod $m $args"
  done </load.order
fi
. /plan
if [ -n "$load" ]; then
  # A module that cannot be removed after its users are gone has leaked a reference.
  awk '$1=="load"{a[++n]=$2} END{for(i=n;i>0;i--)print a[i]}' /load.order | while read -r m; do
    name=$(echo "${m%.ko}" | tr - _)
    grep -q "^$name " /proc/modules || continue   # a test removed it itself
    rmmod "$name" || { say "@@KERNEL rmmod $name failed"; echo "rmmod $name failed" >/tmp/rmmod-failed; }
  done
  [ -f /tmp/rmmod-failed ] && worst=1
fi
if [ "$KMEMLEAK" = 1 ] && [ -w /sys/kernel/debug/kmemleak ]; then
  # An object counts as leaked once it is 5 s old and a second scan finds no pointer to it.
  sleep 5.5; echo scan >/sys/kernel/debug/kmemleak; echo scan >/sys/kernel/debug/kmemleak
  cat /sys/kernel/debug/kmemleak >/tmp/kmemleak; cat /tmp/kmemleak
  grep 'unreferenced object' /tmp/kmemleak >/tmp/leaks && worst=1
  while read -r line; do say "@@KERNEL kmemleak: $line"; done </tmp/leaks
fi

# A program's own crash ("general protection fault ip:") is the test's business; a kernel crash
# ("fault:", "fault,") is an error.
bad='BUG:|KASAN:|UBSAN:|WARNING:|INFO: (possible|task|rcu|suspicious|inconsistent)|rcu:.*stall|Oops|general protection fault[:,]|unreferenced object|sleeping function|refcount_t:|Bad page|scheduling while atomic'
dmesg | grep -E "$bad" >/tmp/bad
if [ -s /tmp/bad ]; then
  worst=1
  head -20 /tmp/bad | while read -r line; do say "@@KERNEL $line"; done
  echo "@@DMESG"; dmesg
fi
leave $worst
