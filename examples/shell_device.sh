#!/usr/bin/env bash
# A device in a shell script: shell_device.sh HOST PORT NAME TOKEN STORE
#
# It needs bash, jq and Mosquitto's command line, and nothing of duly. The folder STORE is its memory. Its one
# command, `count`, adds one to a number in STORE/count; put your own effects into the function `effect`.
#
#     duly conform device mqtt://127.0.0.1:1883 --run 'examples/shell_device.sh {host} {port} {name} {token} {store}'
set -u
export LC_ALL=C
host=$1 port=$2 name=$3 token=$4 store=$5
kept=100 # commands that are remembered
session=$(date +%s%N)
mkdir -p "$store/known" "$store/marks" "$store/lanes"
touch "$store/arrivals"

publish() { # TOPIC JSON [OPTION…]
    mosquitto_pub -h "$host" -p "$port" -u "$name" -P "$token" -i "$name-$BASHPID" -q 1 -t "nodes/$1" -m "$2" "${@:3}"
}

status() { printf '{"time":%d,"online":%s,"session":"%s","heartbeat":60}' "$(date +%s)" "$1" "$session"; }

# Replace a file as a whole: after a kill or a power cut there is the old one or the new one.
put() { # FILE TEXT
    printf %s "$2" >"$1.new" && sync "$1.new" && mv "$1.new" "$1" && sync "$(dirname "$1")"
}

later() { # ID ID: whether the first is later than the second, as numbers
    [ "${1%_*}" -gt "${2%_*}" ] || { [ "${1%_*}" -eq "${2%_*}" ] && [ "${1#*_}" -gt "${2#*_}" ]; }
}

effect() { # ACTION: does it, and prints the answer; fails if there is no such action
    [ "$1" = count ] || return 1
    local n
    n=$(($(cat "$store/count" 2>/dev/null || echo 0) + 1))
    put "$store/count" "$n"
    printf '{"count":%d}' "$n"
}

failed() { publish hub/failed "{\"msg_id\":\"$1\",\"error\":{\"code\":$2,\"state\":\"$3\"},\"enc\":\"json\"}"; }

# Forget the oldest; of each sender the newest forgotten id stays as a mark.
forget() {
    local sender id
    while [ "$(wc -l <"$store/arrivals")" -gt "$kept" ]; do
        read -r sender id <"$store/arrivals"
        if ! [ -e "$store/marks/$sender" ] || later "$id" "$(cat "$store/marks/$sender")"; then
            put "$store/marks/$sender" "$id"
        fi
        put "$store/arrivals" "$(tail -n +2 "$store/arrivals")
"
        rm -f "$store/known/$sender.$id"
    done
}

take() { # MSG_ID ACTION EXP LANE AFTER
    local msg_id=$1 action=$2 exp=$3 lane=$4 sender seq_id rest answer
    sender=${msg_id%%:*} rest=${msg_id#*:}
    seq_id=${rest%:*}
    [[ $sender =~ ^[A-Za-z0-9._-]+$ && $seq_id =~ ^(0|[1-9][0-9]{0,14})_(0|[1-9][0-9]{0,17})$ ]] || return
    local file="$store/known/$sender.$seq_id" mark="$store/marks/$sender"
    if [ -e "$file" ]; then # repeats-the-answer; BEGUN: a kill interrupted it, so nothing is said
        answer=$(cat "$file")
        [ "$answer" = BEGUN ] || publish hub/complete "{\"msg_id\":\"$msg_id\",\"value\":$answer,\"enc\":\"json\"}"
        return
    fi
    if [ -e "$mark" ] && ! later "$seq_id" "$(cat "$mark")"; then return; fi # never-runs-the-forgotten
    if [ "$action" != count ]; then failed "$msg_id" 7 failed; return; fi    # names-the-unknown
    if [ "$exp" -gt 0 ] && [ "$exp" -lt "$(date +%s)" ]; then failed "$msg_id" 4 expired; return; fi
    if [ "$lane" != - ]; then # keeps-order: what comes after a later one is not run any more
        lane="$store/lanes/$sender.$(printf %s "$lane" | md5sum | cut -c1-32)"
        if [ -e "$lane" ] && later "$(cat "$lane")" "$seq_id"; then failed "$msg_id" 4 superseded; return; fi
        put "$lane" "$seq_id"
    fi
    echo "$sender $seq_id" >>"$store/arrivals"
    put "$file" BEGUN # runs-once-over-kills
    forget
    publish hub/ack "{\"msg_id\":\"$msg_id\"}" # confirms-receipt
    answer=$(effect "$action")
    put "$file" "$answer" # stores-before-it-answers
    publish hub/complete "{\"msg_id\":\"$msg_id\",\"value\":$answer,\"enc\":\"json\"}"
}

# What cannot be read prints nothing. A field that is missing is a dash or a zero.
fields='select(type == "object" and (.msg_id | type) == "string" and (.action | type) == "string")
    | .msg_id, .action, (.exp // 0 | floor), (if .order and .order.mode != "any" then .order.key // "" else "-" end), (.order.after // -1)
    | tostring | gsub("[\n\r]"; " ")'

mosquitto_sub -h "$host" -p "$port" -u "$name" -P "$token" -i "$name" -c -q 1 -k 30 \
    -t "nodes/$name/pending" -t "nodes/$name/status" -F '%t %p' \
    --will-topic "nodes/$name/status" --will-payload "$(status false)" --will-qos 1 --will-retain |
    {
        publish "$name/status" "$(status true)" -r
        while read -r topic message; do
            case $topic in
                */status) # a will, ours or an older one, that came after we did: we are here
                    case $message in *'"online":false'*) publish "$name/status" "$(status true)" -r ;; esac ;;
                */pending)
                    mapfile -t field < <(jq -r "$fields" 2>/dev/null <<<"$message")
                    [ "${#field[@]}" -eq 5 ] && take "${field[@]}" ;;
            esac
        done
    }
