#!/usr/bin/env bash
# A sentinel in a shell script: shell_sentinel.sh URL TOKEN STORE [PROFILE]
#
# It needs bash, jq and curl, and nothing of duly. It reads signals, one on a line, REASON DEVICE [critical], and
# reports them by POST URL/v1/messages. The folder STORE holds what is not acknowledged yet, and survives a kill.
#
#     tail -F sensors.log | examples/shell_sentinel.sh https://hub.example.com "$TOKEN" ./store home
set -u
export LC_ALL=C
url=$1 token=$2 store=$3 profile=${4:-default}
debounce=30 per_hour=10
mkdir -p "$store/queue" "$store/last" "$store/hour"

# Replace a file as a whole: after a kill or a power cut there is the old one or the new one.
put() { # FILE TEXT
    printf %s "$2" >"$1.new" && sync "$1.new" && mv "$1.new" "$1" && sync "$(dirname "$1")"
}

name_of() { printf %s "$1" | sha256sum | cut -c1-32; } # a file name for any text

held_back() { # REASON DEVICE: the same reason within half a minute, or too much of one device in an hour
    local now last hour since n
    now=$(date +%s) last=$store/last/$(name_of "$1 $2") hour=$store/hour/$(name_of "$2")
    [ -f "$last" ] && [ $((now - $(cat "$last"))) -lt $debounce ] && return 0
    read -r since n <<<"$(cat "$hour" 2>/dev/null || echo "$now 0")"
    [ $((now - since)) -ge 3600 ] && since=$now n=0
    put "$hour" "$since $((n + 1))"
    [ "$n" -eq $per_hour ] && echo "$2: more than $per_hour signals this hour are held back" >&2
    [ "$n" -ge $per_hour ] && return 0
    put "$last" "$now"
    return 1
}

report() { # REASON DEVICE SEVERITY: the id is minted once, and stored with the event before it is sent
    local ms id
    ms=$(date +%s%3N) id=$(name_of "$profile $1 $2 $(date +%s%N) $RANDOM")
    put "$store/queue/$(date +%s%N).json" "$(
        jq -cn --arg id "$id" --arg profile "$profile" --arg reason "$1" --arg device "$2" --argjson ms "$ms" --arg severity "$3" \
            '{type: "alert_event", seq_id: $id, data: {profile_id: $profile, trigger_reason: $reason,
              device_address: $device, timestamp: $ms, severity: $severity}}'
    )"
}

send_queue() { # the oldest first, each again until the hub has answered for its id
    local event id said code pause=1
    while :; do
        event=$(find "$store/queue" -name '*.json' | sort | head -n 1)
        [ -n "$event" ] || { sleep 0.1; continue; }
        id=$(jq -r .seq_id "$event")
        # A request without a time limit (-m) waits for ever for an answer that was lost.
        said=$(curl -s -m 5 -H "Authorization: Bearer $token" --json @"$event" "$url/v1/messages")
        code=$(jq -r --arg id "$id" 'select(.seq_id == $id) | .code' <<<"$said" 2>/dev/null)
        case $code in
        0 | 5) rm "$event"; pause=1; continue ;;
        2 | 3) echo "refused: $said" >&2; mv "$event" "$event.refused"; continue ;;
        esac
        sleep $pause
        pause=$((pause * 2 > 60 ? 60 : pause * 2))
    done
}

send_queue &
sender=$!
trap 'kill $sender' EXIT
while read -r reason device severity; do
    [ "${severity:-warning}" = critical ] || ! held_back "$reason" "$device" && report "$reason" "$device" "${severity:-warning}"
done
# No more signals: what is left is sent before it ends.
while [ -n "$(find "$store/queue" -name '*.json')" ]; do sleep 0.1; done
