#!/usr/bin/env bash
# A worker in bash 5, written from docs/worker-contract.md: it speaks the protocol of NATS itself, with jq, setsid and
# the GNU coreutils. NATS_URL, JOB_STREAM and JOB_CONSUMER say what it works on. It prints what each job says.
#
# It keeps each line that `jetstream-worker conform` tries. It knows no TLS, no password and only one address; where its
# connection breaks, it ends the attempt, and the job comes back after its wait. It starts two dozen processes for each
# job: it is for jobs that take seconds.
set -u
# Lengths are those of bytes then.
LC_ALL=C
queue=${JOB_STREAM-} consumer=${JOB_CONSUMER-} address=${NATS_URL:-nats://127.0.0.1:4222}
me=_INBOX.$$.$RANDOM$RANDOM number=0 handler='' crlf=$'\r\n'

# What the worker is for: the job is on stdin; what is printed is its result, as JSON. Status 3 gives the job up, for
# the reason that is printed; each other one but 0 is a failure. Here it says what it was given, and fails where the
# job says so.
run() {
  local job
  job=$(cat)
  echo "job $job, delivery $DELIVERY" >&2
  case $job in
    "give up"*) echo "the job says so" && return 3 ;;
    fail*) return 1 ;;
    sleep*) sleep "${job#sleep }" ;;
  esac
  printf '{"length": %d}' "${#job}"
}

# publish SUBJECT [REPLY] [HEADERS]: sends stdin.
publish() {
  local size
  cat >"$folder/out"
  size=$(wc -c <"$folder/out")
  if [[ ${3-} ]]; then
    printf 'HPUB %s %s %d %d\r\n%s' "$1" "$2" ${#3} $((${#3} + size)) "$3"
  else
    printf 'PUB %s %s %d\r\n' "$1" "${2-}" "$size"
  fi >&3
  cat "$folder/out" >&3
  printf '\r\n' >&3
}

# receive SECONDS: takes the next message into subject, reply, headers and the file in; fails where there is none.
receive() {
  local first line words size
  while :; do
    IFS= read -r -u 3 -t "$1" -N 1 first
    case $? in 0) ;; 1) connection_lost ;; *) return 1 ;; esac
    IFS= read -r -u 3 line || connection_lost
    read -ra words <<<"$first${line%$'\r'}"
    case ${words[0]-} in
      PING) printf 'PONG\r\n' >&3 ;;
      -ERR) echo "${words[*]}" >&2 ;;
      MSG | HMSG)
        subject=${words[1]} reply='' headers='' size=${words[-1]}
        if [[ ${words[0]} == HMSG ]]; then
          headers=$(head -c "${words[-2]}" <&3)
          size=$((size - words[-2]))
          unset 'words[-1]'
        fi
        ((${#words[@]} == 5)) && reply=${words[3]}
        head -c "$size" <&3 >"$folder/in"
        head -c 2 <&3 >/dev/null
        return 0
        ;;
    esac
  done
}

# request SUBJECT [HEADERS]: sends stdin and takes the answer into the file in; fails where there is none.
request() {
  local inbox=$me.$((++number))
  publish "$1" "$inbox" "${2-}"
  while receive 2; do
    if [[ $subject == "$inbox" ]]; then
      [[ $headers != "NATS/1.0 503"* ]]
      return
    fi
  done
  return 1
}

# is_own SUBJECT BODY: whether the message for which the server has dropped an end, as the file in says, is an end of the
# same job: anybody may have used its id.
is_own() {
  jq -e .duplicate "$folder/in" >/dev/null || return 0
  request "\$JS.API.STREAM.MSG.GET.$(jq -r .stream "$folder/in")" < <(jq -c '{seq}' "$folder/in") || return
  jq -e --arg subject "$1" --argjson body "$2" '
    .message | select(.subject == $subject) | .data | @base64d | fromjson?
    | select(.type | . == "io.airflow.jetstream.v1.completion" or . == "io.airflow.jetstream.v1.cancelled")
    | {stream, consumer, stream_seq} == ($body | {stream, consumer, stream_seq})' "$folder/in" >/dev/null
}

is_stored() { jq -e '.stream and .seq and (has("error") | not)' "$folder/in" >/dev/null; }
in_progress() { publish "$ack" < <(printf +WPI); }
fail() { publish "$ack" < <(printf '%s {"delay": 1000000000}' -NAK); }

# header NAME: the first value of a header of the job.
header() {
  local line
  while IFS= read -r line; do
    [[ $line == "$1:"* ]] && line=${line#*:} && line=${line# } && printf %s "${line%$'\r'}" && return
  done <<<"$job_headers"
}

# The job's id as JSON.
job_id() {
  jq -cn --arg job "$(header Job-Id)" --arg message "$(header Nats-Msg-Id)" --arg sequence "$sequence" \
    --rawfile body "$folder/job" '
    def usable($longest): select(utf8bytelength > 0 and utf8bytelength <= $longest);
    def exact: select(contains("\ufffd") | not);
    first(
      ($job | exact | usable(10000)),
      ($body | select(startswith("{")) | fromjson? | .id
        | if type == "number" and . == floor and fabs < 9e15 then tostring else strings end | usable(1000)),
      ($message | exact | usable(1000) | select(startswith("redrive:") | not)),
      $sequence
    )'
}

# microseconds DURATION: of one such as 1h30m, or a bare number of seconds; nothing where the text is none.
microseconds() {
  jq -n --arg text "$1" '
    {ns: 1e-3, us: 1, "µs": 1, ms: 1e3, s: 1e6, m: 6e7, h: 3.6e9, d: 8.64e10, w: 6.048e11} as $unit
    | $text | select(length <= 64) | if test("^[0-9]+([.][0-9]+)?$") then . + "s" else . end
    | select(test("^([0-9]+([.][0-9]+)?(ns|us|µs|ms|[smhdw]))+$"))
    | [scan("([0-9.]+)(ns|us|µs|ms|[smhdw])") | (.[0] | tonumber) * $unit[.[1]]] | add | ceil | select(. < 9.3e15)'
}

# Whether the job comes too late; a redriven one that was stored after its expiry doesn't.
is_expired() {
  local expires redrives
  expires=$(header Job-Expires) redrives=$(header Redrive-Count)
  [[ $expires =~ ^[0-9]{4}-[0-9-]{5}[Tt][0-9:.]+([Zz]|[+-][0-9:]{5})?$ && ${#expires} -le 64 ]] || return
  expires=$(date -u -d "${expires^^}" +%s%N) || return
  [[ $redrives =~ ^0*[1-9][0-9]*$ && ${#redrives} -le 18 ]] && ((stored > expires)) && return 1
  (($(date +%s%N) > expires))
}

# store_end TYPE FIELDS: stores the job's end, and only then acknowledges the job; both again until they are confirmed.
store_end() {
  local set='' name value body place="completed.$queue.$consumer.$sequence" msg_id="done:$queue:$sequence:$stored"
  for name in traceparent tracestate; do
    value=$(header "$name")
    [[ $value ]] && set+="$name: $value$crlf"
  done
  body=$(jq -cn --arg type "io.airflow.jetstream.v1.$1" --argjson fields "${2:-null}" --arg stream "$queue" \
    --arg consumer "$consumer" --argjson stream_seq "$sequence" --argjson deliveries "$deliveries" --argjson id "$id" \
    '{$type, timestamp: (now | todate), $stream, $consumer, $stream_seq, $deliveries, $id, job_id: $id} + $fields')
  until request "$place" "NATS/1.0${crlf}Nats-Msg-Id: $msg_id$crlf$set$crlf" <<<"$body" && is_stored &&
    if is_own "$place" "$body"; then request "$ack" < <(printf +ACK); else
      msg_id+=":$RANDOM$RANDOM$RANDOM"
      false
    fi; do
    echo "not confirmed, sending it again" >&2
    in_progress
    sleep 0.5
  done
}

# give_up REASON EXPLANATION: stores the record of a dead letter, and only then terminates the job.
give_up() {
  local set=NATS/1.0$crlf line
  while IFS= read -r line; do
    line=${line%$'\r'}
    [[ -z $line || ${line,,} =~ ^(nats[-/]|dead-letter-) ]] || set+=$line$crlf
  done <<<"$job_headers"
  set+="Dead-Letter-Version: 1${crlf}Dead-Letter-Sequence: $sequence${crlf}Dead-Letter-Subject: $job_subject$crlf"
  set+="Dead-Letter-Reason: $1${crlf}Dead-Letter-Explanation: $2$crlf$crlf"
  if request "dead.$queue.$consumer.$sequence" "$set" <"$folder/job" && is_stored; then
    publish "$ack" < <(printf '+TERM %s' "$2")
  else
    fail
  fi
}

# Runs the job once, within its deadline; the status is the handler's.
attempt() {
  local limit now status began=${EPOCHREALTIME/./} next=0 is_late=''
  limit=$(microseconds "$(header Job-Deadline)")
  # In a session of its own, whose processes end together.
  DELIVERY=$deliveries setsid "$BASH" "$0" run <"$folder/job" >"$folder/result" 3>&- &
  handler=$!
  while kill -0 "$handler" 2>/dev/null; do
    receive 0.1
    now=${EPOCHREALTIME/./}
    ((now >= next)) && in_progress && next=$((now + job_wait / 3000))
    ((limit && now - began > limit)) && is_late=1 && kill -KILL -- "-$handler" 2>/dev/null
  done
  wait "$handler"
  status=$?
  handler=''
  [[ $is_late ]] && return 1
  return "$status"
}

work() {
  local tokens at token found
  IFS=. read -ra tokens <<<"$ack"
  ((${#tokens[@]} == 9)) && at=4 || at=6
  deliveries=${tokens[at]} sequence=${tokens[at + 1]} stored=${tokens[at + 3]} id=
  ((deliveries < ${#waits[@]})) && job_wait=${waits[deliveries - 1]} || job_wait=${waits[-1]}
  id=$(job_id) && token=$(jq -j . <<<"$id" | sha256sum) || return
  for token in "${token%% *}" "$sequence"; do
    request "\$JS.API.STREAM.MSG.GET.$events" <<<"{\"last_by_subj\": \"cancelled.$queue.$token\"}" || return
    found=$(jq -r '.error.err_code // .message.time' "$folder/in")
    # Neither that there is none, nor an earlier one.
    [[ $found == 10037 ]] || { [[ $found == *T* ]] && (($(date -u -d "$found" +%s%N) < stored)); } || break
  done
  if [[ $found == *T* ]] && (($(date -u -d "$found" +%s%N) >= stored)); then
    found=$(jq -r .message.data "$folder/in" | base64 -d | jq -c '{why, by} | with_entries(select(.value))')
    store_end cancelled "$found"
  elif [[ $found != *T* && $found != 10037 ]]; then
    echo "the job comes back after its wait: error $found" >&2
  elif is_expired; then
    give_up expired "delivered after its Job-Expires"
  else
    attempt
    case $? in
      0)
        found=$(jq -cs 'if length > 1 then error elif .[0] == null then {} else {result: .[0]} end' "$folder/result")
        ;;
      3) give_up terminated "$(head -n 1 "$folder/result" | head -c 1000)"; return ;;
      *) found= ;;
    esac
    if [[ $found ]]; then store_end completion "$found"; else fail; fi
  fi
}

clean_up() {
  [[ $handler ]] && kill -KILL -- "-$handler" 2>/dev/null
  rm -rf "$folder"
}

connection_lost() {
  echo "the connection is lost" >&2
  clean_up
  sleep 0.5
  exec "$BASH" "$0"
}

if [[ ${1-} == run ]]; then
  run
  exit
fi
folder=$(mktemp -d)
trap 'clean_up; exit 143' HUP INT TERM
# Otherwise to write to a broken connection would end this shell.
trap : PIPE
address=${address#nats://}
[[ $address == *:* ]] || address+=:4222
until exec 3<>"/dev/tcp/${address%:*}/${address##*:}"; do sleep 1; done
printf 'CONNECT {"verbose": false, "pedantic": false, "headers": true, "no_responders": true, "lang": "bash"}\r\n' >&3
printf 'SUB %s.* 1\r\n' "$me" >&3
request "\$JS.API.CONSUMER.INFO.$queue.$consumer" </dev/null
mapfile -t waits < <(jq '.config | select(.ack_policy == "explicit") | .backoff // [.ack_wait] | .[]' "$folder/in")
request "\$JS.API.STREAM.NAMES" <<<"{\"subject\": \"completed.$queue.>\"}"
events=$(jq -r '.streams[0] // empty' "$folder/in")
if [[ -z $events || ${#waits[@]} -eq 0 ]]; then
  echo "expected a consumer with explicit acknowledgement and an events stream, found none" >&2
  clean_up
  exit 1
fi
echo "working on $consumer of $queue"
while :; do
  publish "\$JS.API.CONSUMER.MSG.NEXT.$queue.$consumer" "$me.job" <<<'{"batch": 1, "expires": 5000000000}'
  while receive 6; do
    if [[ $reply == "\$JS.ACK."* ]]; then
      mv "$folder/in" "$folder/job"
      ack=$reply job_subject=$subject job_headers=$headers
      work
      break
    fi
    # No job has come.
    [[ $subject == "$me.job" ]] && sleep 0.1 && break
  done
done
