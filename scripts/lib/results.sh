# shellcheck shell=bash
# Sourced by the test runner and by run-guest.sh: counts the results of a test program.

# count_result STATUS LOG JSON: prints "PASSED FAILED SKIPPED" of one test program that ended with
# STATUS.
#
# JSON is GoogleTest's result file. If it is missing or empty, the program was no GoogleTest program
# or died before writing it, and the log decides. A program without GoogleTest lines counts as one
# test, or as its own last line "N passed, N failed, N skipped" says. These count as one more
# failure: a status that no test explains (a leak found at exit, a crash, a timeout), each test that
# never ran after a crash, and a run without tests. A disabled test counts as skipped, except in a
# suite named ..Child: such a test is run by another test, in a process that it starts.
count_result() {
  local status=$1 log=$2 json=$3 passed=0 failed=0 skipped=0 own
  if [ -s "$json" ]; then
    # GoogleTest writes one field a line and escapes line breaks in strings, so the indentation
    # identifies a test's own fields.
    read -r passed failed skipped < <(tr -d '\r' <"$json" | awk '
      function close_test() { if (result == "") return
        if (bad) f++; else if (result == "COMPLETED") p++; else if (result == "SKIPPED" || class !~ /Child$/) s++
        result = ""; bad = 0 }
      /^          "name": /      { close_test() }
      /^          "result": "/   { split($0, part, "\""); result = part[4] }
      /^          "classname": "/ { split($0, part, "\""); class = part[4] }
      /^          "failures": \[/ { bad = 1 }
      END { close_test(); print p + 0, f + 0, s + 0 }')
    [ $((passed + failed + skipped)) = 0 ] && failed=1
    [ "$status" != 0 ] && [ "$failed" = 0 ] && failed=1
  elif grep -aq '^\[ RUN      \] ' "$log"; then
    read -r passed failed skipped < <(tr -d '\r' <"$log" | awk '
      / [A-Za-z]*Child\.DISABLED_/   { next }
      /^\[==========\] Running [0-9]+ test/ { if (!n) n = $3 }
      /^\[ RUN      \] /            { if (open) f++; open = 1; begun++ }
      /\[       OK \] .* ms\)$/     { if (open) p++; open = 0 }
      /\[  FAILED  \] .* ms\)$/     { if (open) f++; open = 0 }
      /\[  SKIPPED \] .* ms\)$/     { if (open) s++; open = 0 }
      END { print p + 0, f + open + (n > begun ? n - begun : 0), s + 0 }')
    [ "$failed" = 0 ] && failed=1
  else
    own=$(tr -d '\r' <"$log" | grep -aE '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' | tail -1 || true)
    if [ -n "$own" ]; then
      read -r passed failed skipped < <(echo "$own" | tr -dc '0-9 \n')
      [ "$status" != 0 ] && [ "$status" != 77 ] && [ "$failed" = 0 ] && failed=1
    else
      case $status in 0) passed=1 ;; 77) skipped=1 ;; *) failed=1 ;; esac
    fi
  fi
  echo "$passed $failed $skipped"
}

# skip_reasons STATUS LOG: one line for each distinct reason, with its count.
skip_reasons() {
  local status=$1 log=$2
  tr -d '\r' <"$log" | awk -v status="$status" '
    / [A-Za-z]*Child\.DISABLED_/ { next }
    /^\[ RUN      \] / { reason = ""; inside = 0 }
    inside && !/\[  SKIPPED \]/ { reason = reason (reason == "" ? "" : " ") $0 }
    /: Skipped$/ { inside = 1 }
    /\[  SKIPPED \] .* ms\)$/ { count[reason == "" ? "no reason given" : reason]++; inside = 0 }
    /^skipped: / { count[substr($0, 10)]++ }
    /^\[ DISABLED \] / { count["disabled in the source"]++ }
    { last = $0 }
    END { for (r in count) { any = 1; printf "%s%s\n", r, (count[r] > 1 ? " (" count[r] " times)" : "") }
          if (!any && status == 77) print last }'
}

# failed_tests LOG: GoogleTest's names of the failed tests and of the test running when the program
# died, and the number of tests that never ran.
failed_tests() {
  tr -d '\r' <"$1" | awk '
    / [A-Za-z]*Child\.DISABLED_/ { next }
    /^\[==========\] Running [0-9]+ test/ { if (!n) n = $3 }
    /^\[==========\] .* ran\./ && $2 == n { n = 0 }
    /^\[ RUN      \] / { if (open != "") print open " (did not finish)"; open = $4; begun++ }
    /\[       OK \] .* ms\)$/ || /\[  SKIPPED \] .* ms\)$/ { open = "" }
    /\[  FAILED  \] .* ms\)$/ { if (open != "") print open; open = "" }
    END { if (open != "") print open " (did not finish)"; if (n > begun) print n - begun " tests that never ran" }'
}

# failed_output LOG: the output of the failed tests, or the end of a log without GoogleTest lines.
failed_output() {
  if grep -aq '^\[ RUN      \] ' "$1"; then
    tr -d '\r' <"$1" | awk '
      function show(  i) { for (i = n > 30 ? n - 30 : 0; i < n; i++) print line[i] }
      / [A-Za-z]*Child\.DISABLED_/ { next }
      /^\[ RUN      \] / { if (open) show(); open = 1; n = 0 }
      open { line[n++] = $0 }
      /\[       OK \] .* ms\)$/ || /\[  SKIPPED \] .* ms\)$/ { open = 0 }
      /\[  FAILED  \] .* ms\)$/ { if (open) show(); open = 0 }
      !open { last[k++ % 8] = $0 }
      END { if (open) show(); else for (i = k > 8 ? k - 8 : 0; i < k; i++) print last[i % 8] }' | head -150
  else
    tail -40 "$1"
  fi
}

# failures_of LOG: the failures in a log of the runner or of the checks, in short: the name of each
# program and of its failed tests, with a few lines for each printed reason, or else its last lines.
failures_of() {
  tr -d '\r' <"$1" | awk '
    function show(  i, shown, left) {
      if (!open) return
      for (i = 0; i < n; i++) if (line[i] ~ /: Failure$|Sanitizer|runtime error:|terminate called|rror: /) reason[i] = 1
      for (i = 0; i < n && shown < 30; i++) { if (i in reason) left = 6; if (left-- > 0) { print "       | " line[i]; shown++ } }
      if (!shown) for (i = n > 8 ? n - 8 : 0; i < n; i++) print "       | " line[i]
      delete reason; n = 0; open = 0
    }
    /^FAIL/ { show(); print; open = 1; never = 0; next }
    open && /^     \.\. / { next }
    open && /^     / {
      if (/^ +(FAIL|failed:|left running:) /) { print; next }
      if (/^ +never ran, each counted/) { print; never = 1; next }
      if (/^ +status [0-9]+; from /) { never = 0; next }
      if (never) { if (never++ <= 20) print; next }
      sub(/^ +(\| )?/, ""); line[n++] = $0; next
    }
    { show() }
    END { show() }'
}

totals_line() { echo "$1 passed, $2 failed, $3 skipped"; }
