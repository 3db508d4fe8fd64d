#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only
# probe.sh FOLDER COMPILER ARGS.. - prints -DVMEM_HAVE_<NAME> for each probe of the folder that compiles
#
# A probe may fail only because the kernel lacks what it uses. So kernel_headers.c, which uses nothing, must compile, and
# each error of a probe must name what it uses: the second word of its line below. Otherwise this prints "error: .." and
# Kbuild stops, because a wrong guess would build a module that is wrong for its kernel.
folder=$1
shift
compile() { LC_ALL=C "$@" -Werror=implicit-function-declaration -Werror=incompatible-pointer-types -c -o /dev/null "$source" 2>&1; }

source=$folder/kernel_headers.c
said=$(compile "$@") || { echo "error: the kernel's headers do not compile: $(echo "$said" | tr "\n" " ")"; exit; }
while read -r name word; do
	source=$folder/$name.c
	if said=$(compile "$@"); then
		echo "-DVMEM_HAVE_$(echo "$name" | tr '[:lower:]' '[:upper:]')"
	elif other=$(echo "$said" | grep 'error:' | grep -v "$word") || ! echo "$said" | grep -q 'error:'; then
		echo "error: the probe $name fails for another reason than $word: $(echo "${other:-$said}" | tr "\n" " ")"
		exit
	fi
done <<EOF
vm_flags_set vm_flags_set
eventfd_signal_one_arg eventfd_signal
release_fault_lock release_fault_lock
folio_large_mapcount folio_large_mapcount
page_double_map PageDoubleMap
shrinker_alloc shrinker_alloc
list_lru_add_obj list_lru_add_obj
list_lru_walk_unlocked list_lru_walk_cb
EOF
