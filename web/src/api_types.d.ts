/** Made from airflow_provider_jetstream/plugins/monitor/models by `make api-types`. */

export interface Account {
  at: string | null;
  age_seconds: number;
  jobs: number;
  stored: number;
  ended: number;
  unaccounted: number;
  sequences: string;
  unknown: number;
  unknown_share: number;
  why_unknown: (string)[];
}

export interface Attempt {
  at: string | null;
  what: "stored" | "first_failure" | "death" | "redriven" | "requeued" | "parked" | "discarded" | "handled";
  text: string;
  sequence: number | null;
}

export interface AuditLine {
  at: string;
  action: string;
  sequence: number;
  new_sequence: number | null;
  new_stream: string | null;
  why: string | null;
  who: Record<string, any>;
  user: string | null;
  run: string | null;
  discarded_by: string | null;
  changes: Record<string, any> | null;
}

export interface ConnectionState {
  connection: string;
  state: "up" | "away" | "refused" | "starting";
  problem: Problem | null;
  taken_at: string | null;
  age_seconds: number | null;
  server: string | null;
  queues: (QueueNumbers)[];
}

export interface ConsumerNumbers {
  name: string;
  filters: (string)[];
  pending: Figure;
  in_flight: Figure;
  redelivered: Figure;
  open_pulls: Figure;
  lag: Figure;
  paused: boolean;
  deliveries_per_second: Figure;
  state: "no_consumer" | "stuck" | "unserved" | "full" | "dying" | "paused" | "waiting" | "working" | "dead" | "idle" | "unknown";
  evidence: string;
  since: string | null;
  partition: number | null;
  partitions: number | null;
  paused_until: string | null;
  max_in_flight: number | null;
  ack_wait_seconds: number | null;
}

export interface ConsumerPaused {
  consumer: string;
  paused_until: string | null;
  recorded: boolean;
}

export interface ControlView {
  action: string;
  who: string;
  why: string | null;
  at: string;
  obeyed: boolean;
}

export interface DeathCountView {
  fingerprint: string;
  error: string;
  count: number;
  as_before: number;
}

export interface Deaths {
  at: string;
  seconds: number;
  count: number;
}

export interface DiagnosisView {
  queue: string;
  at: string;
  dead: number;
  uncertain: number;
  action: string;
  headline: string | null;
  groups: (Record<string, any>)[];
  letters_left_out: number;
}

export interface DryRun {
  protocol: string;
  guarantee: string;
  redriven: number;
  parked: number;
  discarded: number;
  failed: number;
  failures: Record<string, string>;
  causes: Record<string, number>;
  changed: number;
  samples: (SampleLetter)[];
  uncertain: number;
  undeliverable: number;
  risks: (string)[];
  counted_at: string;
  awaits_ends: boolean;
  conf: Record<string, any>;
}

export interface DryRunRequest {
  select: Record<string, any>;
  action: "redrive" | "park" | "in_place" | "discard" | "undo";
  patch: string | null;
  undo: string | null;
}

export interface EditRequest {
  sha256: string;
  body: string | null;
  headers: ([string, string])[] | null;
  subject: string | null;
  why: string | null;
  dry_run: boolean;
}

export interface EditResult {
  sequence: number;
  diff: string;
  headers: ([string, string | null, string | null])[];
  subject: string | null;
  size_before: number;
  size_after: number;
  warnings: (string)[];
  redriven: number | null;
  redrive: string | null;
}

export interface Figure {
  value: number | number | null;
  age: number | null;
  certainty: "exact" | "about" | "at_least" | "old" | "unknown";
}

export interface FoundLetter {
  type: "found";
  letter: LetterLine;
  state: "dead" | "parked" | "redriven" | "requeued" | "discarded" | "handled" | "ended";
  where: ("job_id" | "error" | "body" | "header")[];
}

export interface Group {
  key: Record<string, string | null>;
  count: Figure;
  first_seen: string;
  last_seen: string;
  example: number;
  share: number;
  error_message: string | null;
  select: Record<string, any> | null;
}

export interface Groups {
  scan: ScanState;
  group_by: (string)[];
  total: Figure;
  uncertain: Figure;
  groups: (Group)[];
  groups_left_out: number;
  not_shown: number;
}

export interface History {
  since: string;
  until: string;
  points: (Point)[];
  deaths: (Deaths)[];
  deaths_known_since: string | null;
  stored: "stream" | "memory";
  sampler: string | null;
  problem: string | null;
}

export interface JobAsked {
  sequence: number;
  asked: "retry" | "give_up";
  attempt: number;
}

export interface JobAttempt {
  number: number;
  state: "running" | "failed" | "unanswered";
  at: string | null;
  worker: string | null;
  fraction: number | null;
  text: string | null;
  seconds: number | null;
  error_class: string | null;
  error_message: string | null;
  error_place: string | null;
  waits_until: string | null;
  asked: string | null;
}

export interface JobDetail {
  job: JobLine;
  hidden: boolean;
  payload: Payload | null;
  headers: ([string, string])[];
  attempts: (JobAttempt)[];
}

export interface JobLine {
  sequence: number;
  job_id: string;
  subject: string;
  consumer: string | null;
  state: "pending" | "delivered" | "unserved";
  stored_at: string;
  size: number;
  redrives: number;
  origin: OriginOfLetter | null;
  attempt: JobAttempt | null;
}

export interface JobPage {
  state: "pending" | "delivered" | "unserved";
  total: number;
  jobs: (JobLine)[];
  next_after: number | null;
  not_shown: number;
}

export interface LetterDetail {
  letter: LetterLine;
  state: "dead" | "parked" | "redriven" | "requeued" | "discarded" | "handled" | "ended";
  now: string | null;
  next: number | null;
  next_queue: string | null;
  source: string | null;
  stored_at: string | null;
  first_failed_at: string | null;
  worker: string | null;
  seconds: number | null;
  traceback: (string)[];
  explanation: string | null;
  hidden: boolean;
  payload: Payload | null;
  headers: ([string, string])[];
  entries: (number)[];
  dead_letter_queue: string;
  attempts: (Attempt)[];
  tries: (JobAttempt)[];
  audit: (AuditLine)[];
}

export interface LetterLine {
  sequence: number;
  job_id: string;
  subject: string;
  consumer: string | null;
  reason: string;
  error_class: string | null;
  error_message: string | null;
  error_place: string | null;
  fingerprint: string;
  traceback_digest: string | null;
  died_at: string;
  deliveries: number | null;
  redrives: number;
  size: number | null;
  parked: string | null;
  origin: OriginOfLetter | null;
  origin_known: boolean;
}

export interface LetterPage {
  scan: ScanState;
  matching: Figure;
  letters: (LetterLine)[];
  next_after: number | null;
  next_offset: number | null;
  gone: number;
}

export interface Limit {
  name: "max_msgs" | "max_bytes" | "max_age";
  used: number;
  limit: number;
  share: number;
}

export interface Me {
  may_act: boolean;
  payloads: boolean;
  dag_id: string;
  refresh_seconds: number;
  connections: (string)[];
  version: string;
  user: string;
  default_timezone: string;
}

export interface MonitorModel {
}

export interface NewestCause {
  reason: string;
  error_class: string | null;
  error_place: string | null;
  dag_id: string | null;
  team: string | null;
  died_at: string;
}

export interface OriginOfLetter {
  dag_id: string;
  run_id: string;
  task_id: string;
  map_index: number;
}

export interface OutcomesView {
  completed: number;
  died_again: number;
  still_running: number;
  unknown: number;
}

export interface PauseRequest {
  why: string | null;
  park_returned: boolean;
  seconds: number;
}

export interface Payload {
  kind: "json" | "text" | "binary";
  raw: string | null;
  hex: string | null;
  parsed: string | null;
  notes: (string)[];
  size: number;
  sha256: string;
  truncated: boolean;
  text: string;
}

export interface Point {
  at: string;
  pending: number | null;
  in_flight: number | null;
  dead: number | null;
  in_per_second: number | null;
  out_per_second: number | null;
}

export interface Problem {
  code: string;
  message: string;
}

export interface QueueDetail {
  numbers: QueueNumbers;
  state: "up" | "away" | "refused" | "starting";
  problem: Problem | null;
  age_seconds: number | null;
  subjects: (string)[];
  retention: string;
  description: string | null;
  dead_letter_queue: string | null;
  events: string | null;
  archive: string | null;
  audit: string | null;
  consumers: (ConsumerNumbers)[];
  history: (Point)[];
  deaths: (Deaths)[];
  max_pause_seconds: number;
  risks: (string)[];
}

export interface QueueNumbers {
  connection: string;
  queue: string;
  declared: boolean;
  pending: Figure;
  in_flight: Figure;
  redelivered: Figure;
  dead: Figure;
  uncertain: Figure;
  parked: Figure;
  lost: Figure;
  deaths_per_minute: Figure;
  deaths_of_hour: (number)[];
  newest: NewestCause | null;
  undeliverable: Figure;
  schedules: Figure;
  stored: Figure;
  bytes: Figure;
  oldest_seconds: Figure;
  in_per_second: Figure;
  out_per_second: Figure;
  consumers: Figure;
  open_pulls: Figure;
  limits: (Limit)[];
  state: "no_consumer" | "stuck" | "unserved" | "full" | "dying" | "paused" | "waiting" | "working" | "dead" | "idle" | "unknown";
  findings: (StateFinding)[];
  problem: Problem | null;
  pending_history: (number | null)[];
}

export interface RedriveList {
  redrives: (RedriveView)[];
  not_shown: number;
}

export interface RedriveView {
  id: string;
  queue: string;
  state: "planned" | "running" | "paused" | "at_gate" | "aborted" | "finished" | "failed";
  reason: string;
  user: string | null;
  who: Record<string, any>;
  why: string | null;
  selection: Record<string, any>;
  plan: Record<string, any>;
  letters: number | null;
  began_at: string;
  at: string;
  redriven: number;
  parked: number;
  discarded: number;
  failed: number;
  gone: number;
  rate: number | null;
  outcomes: OutcomesView;
  failures: Record<string, string>;
  waves: (WaveView)[];
  controls: (ControlView)[];
  hidden: boolean;
  summary: string;
}

export interface SampleLetter {
  sequence: number;
  job_id: string;
  subject: string;
  reason: string;
  error_class: string | null;
  error_place: string | null;
  difference: string;
}

export interface ScanState {
  state: "ready" | "scanning" | "failed";
  problem: Problem | null;
  scanned_at: string | null;
  age_seconds: number | null;
  seen: number;
  complete: boolean;
}

export interface SearchEnd {
  type: "end";
  reason: "all" | "limit" | "time" | "error";
  read: number;
  found: number;
  next_after: number | null;
  not_shown: number;
  problem: string | null;
}

export interface SearchProgress {
  type: "progress";
  read: number;
  of: number;
}

export interface Snapshot {
  connections: (ConnectionState)[];
  refresh_seconds: number;
}

export interface StateFinding {
  state: "no_consumer" | "stuck" | "unserved" | "full" | "dying" | "paused" | "waiting" | "working" | "dead" | "idle" | "unknown";
  part: "queue" | "consumer" | "subject";
  name: string;
  evidence: string;
  since: string | null;
  pending: number;
}

export interface SteerRequest {
  why: string | null;
  park_returned: boolean;
}

export interface TaskJobs {
  dag_id: string;
  run_id: string;
  task_id: string | null;
  map_index: number | null;
  queues: (TaskQueue)[];
  connections: (ConnectionState)[];
  scanning: (string)[];
}

export interface TaskQueue {
  connection: string;
  queue: string;
  task_id: string | null;
  map_index: number | null;
  published_at: string | null;
  published: Figure;
  ended: Figure;
  stored: Figure;
  closed: boolean | null;
  letters: Figure;
  parked: Figure;
  select: Record<string, any>;
}

export interface WaveView {
  number: number;
  size: number | null;
  state: string;
  began_at: string;
  redriven: number;
  parked: number;
  outcomes: OutcomesView;
  died_of: (DeathCountView)[];
  parked_again: number;
  brought_again: number;
  passed_by: string;
  reason: string;
}
