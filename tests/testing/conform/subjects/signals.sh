#!/usr/bin/env bash
# The signals that `duly conform sentinel` wants to see: every 0.3 s REASON DEVICE, for shell_sentinel.sh.
run=$(date +%s%N)
for ((n = 0; ; n++)); do
    printf '%s\n' "conform $run-$n" "repeated $run-same" "busy-$n $run-busy"
    sleep 0.3
done
