// A worker in Go, written from docs/worker-contract.md: Go 1.22 and the module github.com/nats-io/nats.go (1.41).
//
//	go mod init worker && go get github.com/nats-io/nats.go && go run worker.go
//
// NATS_URL, JOB_STREAM and JOB_CONSUMER say what it works on. It prints what each job says.
package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

var queue, consumer = os.Getenv("JOB_STREAM"), os.Getenv("JOB_CONSUMER")

type worker struct {
	js     jetstream.JetStream
	events string
	waits  []time.Duration
}

type job struct {
	jetstream.Msg
	*jetstream.MsgMetadata
	id string
}

type end struct {
	Type       string    `json:"type"`
	Timestamp  time.Time `json:"timestamp"`
	Stream     string    `json:"stream"`
	Consumer   string    `json:"consumer"`
	StreamSeq  uint64    `json:"stream_seq"`
	Deliveries uint64    `json:"deliveries"`
	ID         string    `json:"id"`
	JobID      string    `json:"job_id"`
	Result     any       `json:"result,omitempty"`
	Why        string    `json:"why,omitempty"`
	By         string    `json:"by,omitempty"`
}

func idOf(message jetstream.Msg, sequence uint64) string {
	header := func(name string, longest int) string {
		value := message.Headers().Get(name)
		if len(value) > longest || !utf8.ValidString(value) || strings.ContainsRune(value, utf8.RuneError) {
			return ""
		}
		return value
	}
	messageID := header("Nats-Msg-Id", 1000)
	if strings.HasPrefix(messageID, "redrive:") {
		messageID = ""
	}
	return cmp.Or(header("Job-Id", 10000), bodyID(message.Data()), messageID, strconv.FormatUint(sequence, 10))
}

func bodyID(data []byte) string {
	// A map, since the fields of a struct are also found under other capitals, such as ID.
	var body map[string]json.RawMessage
	if len(data) == 0 || data[0] != '{' || !utf8.Valid(data) || json.Unmarshal(data, &body) != nil {
		return ""
	}
	id := string(body["id"])
	if !wholeNumber.MatchString(id) && json.Unmarshal(body["id"], &id) != nil || len(id) > 1000 {
		return ""
	}
	return id
}

type cancellation struct{ Why, By string }

// The cancellation of a job or of its id that was stored at the time of the job or later; nil where there is none.
func (w *worker) cancellationOf(j *job) (*cancellation, error) {
	byID := fmt.Sprintf("%x", sha256.Sum256([]byte(j.id)))
	for _, token := range []string{byID, strconv.FormatUint(j.Sequence.Stream, 10)} {
		found, err := w.stored(w.events, fmt.Sprintf(`{"last_by_subj": "cancelled.%s.%s"}`, queue, token))
		if err != nil {
			return nil, err
		}
		if found != nil && !found.Time.Before(j.Timestamp) {
			cancelled := &cancellation{}
			return cancelled, json.Unmarshal(found.Data, cancelled)
		}
	}
	return nil, nil
}

var (
	printable   = regexp.MustCompile(`^[ -~]+$`)
	wholeNumber = regexp.MustCompile(`^-?\d+$`)
	bareNumber  = regexp.MustCompile(`^\d+(\.\d+)?$`)
	durations   = regexp.MustCompile(`^(\d+(\.\d+)?(ns|us|µs|ms|s|m|h|d|w))+$`)
	duration    = regexp.MustCompile(`(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d|w)`)
	secondsOf   = map[string]float64{
		"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800,
	}
)

// The time of a duration such as 1h30m, or of a bare number of seconds; 0 where the text is none.
func parseDuration(text string) time.Duration {
	if utf8.RuneCountInString(text) > 64 {
		return 0
	}
	if bareNumber.MatchString(text) {
		text += "s"
	}
	nanoseconds := 0.0
	if durations.MatchString(text) {
		for _, part := range duration.FindAllStringSubmatch(text, -1) {
			number, _ := strconv.ParseFloat(part[1], 64)
			nanoseconds += number * secondsOf[part[2]] * 1e9
		}
	}
	if nanoseconds >= math.MaxInt64 {
		return 0
	}
	return time.Duration(nanoseconds)
}

// Whether a job comes too late; a redriven one that was stored after its expiry doesn't.
func isExpired(j *job) bool {
	text := strings.ToUpper(j.Headers().Get("Job-Expires"))
	expires, err := time.Parse(time.RFC3339, text)
	if err != nil {
		expires, err = time.Parse(time.RFC3339, text+"Z")
	}
	if err != nil || len(text) > 64 || time.Now().Before(expires) {
		return false
	}
	count := j.Headers().Get("Redrive-Count")
	redrives, err := strconv.ParseUint(count, 10, 64)
	isRedriven := err == nil && len(count) <= 18 && redrives > 0
	return !isRedriven || j.Timestamp.Before(expires)
}

type storedMessage struct {
	Subject string
	Data    []byte
	Time    time.Time
}

// The message of a stream that a request names; nil where there is none, or the user may not read it.
func (w *worker) stored(stream, request string) (*storedMessage, error) {
	// The client's own functions may ask a replica that doesn't have the last message yet.
	answer, err := w.js.Conn().Request("$JS.API.STREAM.MSG.GET."+stream, []byte(request), 5*time.Second)
	if err != nil {
		return nil, err
	}
	var found struct {
		Error   *jetstream.APIError
		Message storedMessage
	}
	if err = json.Unmarshal(answer.Data, &found); err != nil {
		return nil, err
	}
	if found.Error != nil && found.Error.ErrorCode != jetstream.JSErrCodeMessageNotFound {
		return nil, found.Error
	}
	if found.Error != nil {
		return nil, nil
	}
	return &found.Message, nil
}

// Whether what is stored under the id of an end is an end of the same job: anybody may have used the id.
func (w *worker) isOwn(ack *jetstream.PubAck, subject string, e end) (bool, error) {
	found, err := w.stored(ack.Stream, fmt.Sprintf(`{"seq": %d}`, ack.Sequence))
	if err != nil || found == nil {
		return false, err
	}
	var other end
	if found.Subject != subject || json.Unmarshal(found.Data, &other) != nil {
		return false, nil
	}
	isEnd := other.Type == "io.airflow.jetstream.v1.completion" || other.Type == "io.airflow.jetstream.v1.cancelled"
	return isEnd && other.Stream == e.Stream && other.Consumer == e.Consumer && other.StreamSeq == e.StreamSeq, nil
}

// Stores a job's end, and only then acknowledges the job; both again until the server confirms them.
func (w *worker) storeEnd(j *job, e end) error {
	e.Timestamp, e.Stream, e.Consumer = time.Now().UTC(), queue, consumer
	e.StreamSeq, e.Deliveries, e.ID, e.JobID = j.Sequence.Stream, j.NumDelivered, j.id, j.id
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	message := nats.NewMsg(fmt.Sprintf("completed.%s.%s.%d", queue, consumer, j.Sequence.Stream))
	message.Data = body
	message.Header.Set("Nats-Msg-Id", fmt.Sprintf("done:%s:%d:%d", queue, j.Sequence.Stream, j.Timestamp.UnixNano()))
	for name, longest := range map[string]int{"traceparent": 128, "tracestate": 512} {
		if value := j.Headers().Get(name); printable.MatchString(value) && len(value) <= longest {
			message.Header.Set(name, value)
		}
	}
	for {
		var ack *jetstream.PubAck
		if ack, err = w.js.PublishMsg(context.Background(), message); err == nil && ack.Duplicate {
			var own bool
			if own, err = w.isOwn(ack, message.Subject, e); err == nil && !own {
				message.Header.Set("Nats-Msg-Id", message.Header.Get("Nats-Msg-Id")+":"+nats.NewInbox())
				_, err = w.js.PublishMsg(context.Background(), message)
			}
		}
		if err == nil {
			err = j.DoubleAck(context.Background())
		}
		if err == nil {
			return nil
		}
		log.Printf("not confirmed, sending it again: %v", err)
		time.Sleep(500 * time.Millisecond)
	}
}

// Stores the record of a dead letter, and only then terminates the job.
func (w *worker) giveUp(j *job, reason, explanation string) error {
	stored := j.Timestamp.UTC().Format(time.RFC3339Nano)
	record := nats.NewMsg(fmt.Sprintf("dead.%s.%s.%d", queue, consumer, j.Sequence.Stream))
	record.Data = j.Data()
	for name, values := range j.Headers() {
		if !strings.HasPrefix(strings.ToLower(name), "nats-") && !strings.HasPrefix(name, "Dead-Letter-") {
			record.Header[name] = values
		}
	}
	record.Header.Set("Dead-Letter-Version", "1")
	record.Header.Set("Dead-Letter-Sequence", strconv.FormatUint(j.Sequence.Stream, 10))
	record.Header.Set("Dead-Letter-Subject", j.Subject())
	record.Header.Set("Dead-Letter-Time", stored)
	record.Header.Set("Dead-Letter-Reason", reason)
	record.Header.Set("Dead-Letter-Explanation", explanation)
	if _, err := w.js.PublishMsg(context.Background(), record); err != nil {
		return errors.Join(err, j.NakWithDelay(time.Second))
	}
	return j.TermWithReason(explanation)
}

// Reports that the job is in progress, three times in each wait of its delivery, until the context ends.
func (w *worker) keepInProgress(ctx context.Context, j *job) {
	ticker := time.NewTicker(w.waits[min(int(j.NumDelivered), len(w.waits))-1] / 3)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			_ = j.InProgress()
		case <-ctx.Done():
			return
		}
	}
}

func (w *worker) work(message jetstream.Msg) error {
	place, err := message.Metadata()
	if err != nil {
		return err
	}
	j := &job{message, place, idOf(message, place.Sequence.Stream)}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go w.keepInProgress(ctx, j)
	if cancelled, err := w.cancellationOf(j); err != nil {
		return err
	} else if cancelled != nil {
		return w.storeEnd(j, end{Type: "io.airflow.jetstream.v1.cancelled", Why: cancelled.Why, By: cancelled.By})
	}
	if isExpired(j) {
		return w.giveUp(j, "expired", "delivered after its Job-Expires")
	}
	result, err := attempt(ctx, j)
	if hopeless := hopelessError(""); errors.As(err, &hopeless) {
		return w.giveUp(j, "terminated", hopeless.Error())
	}
	if err != nil {
		log.Printf("job %s failed: %v", j.id, err)
		return j.NakWithDelay(time.Second)
	}
	return w.storeEnd(j, end{Type: "io.airflow.jetstream.v1.completion", Result: result})
}

// Runs the job once, within its deadline.
func attempt(ctx context.Context, j *job) (any, error) {
	if limit := parseDuration(j.Headers().Get("Job-Deadline")); limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	result, err := run(ctx, j)
	return result, cmp.Or(ctx.Err(), err)
}

type hopelessError string

func (e hopelessError) Error() string { return string(e) }

// What the worker is for: here it says what it was given, and fails where the job says so. It has to end when ctx does.
func run(ctx context.Context, j *job) (any, error) {
	text := string(j.Data())
	log.Printf("job %s, delivery %d", text, j.NumDelivered)
	if strings.HasPrefix(text, "give up") {
		return nil, hopelessError("the job says so")
	}
	if strings.HasPrefix(text, "fail") {
		return nil, errors.New("the job says so")
	}
	if seconds, isSleep := strings.CutPrefix(text, "sleep "); isSleep {
		select {
		case <-time.After(parseDuration(seconds)):
		case <-ctx.Done():
		}
	}
	return map[string]int{"length": len(text)}, nil
}

func main() {
	url := cmp.Or(os.Getenv("NATS_URL"), nats.DefaultURL)
	client := must(nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(500*time.Millisecond)))
	js := must(jetstream.New(client))
	events := must(js.StreamNameBySubject(context.Background(), fmt.Sprintf("completed.%s.>", queue)))
	jobs := must(js.Consumer(context.Background(), queue, consumer))
	config := jobs.CachedInfo().Config
	if config.AckPolicy != jetstream.AckExplicitPolicy {
		log.Fatal("expected a consumer with explicit acknowledgement")
	}
	w := &worker{js, events, config.BackOff}
	if len(w.waits) == 0 {
		w.waits = []time.Duration{config.AckWait}
	}
	log.Printf("working on %s of %s", consumer, queue)
	for {
		// One at a time: the wait of a job begins when it is delivered.
		message, err := jobs.Next(jetstream.FetchMaxWait(2 * time.Second))
		if errors.Is(err, nats.ErrTimeout) {
			continue
		}
		if err = w.work(must(message, err)); err != nil {
			log.Printf("the job comes back after its wait: %v", err)
		}
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
