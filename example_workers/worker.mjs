// A worker in JavaScript, written from docs/worker-contract.md: Node 20 and the npm package nats.
// NATS_URL, JOB_STREAM and JOB_CONSUMER say what it works on. It prints what each job says.
import { createHash, randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { AckPolicy, JSONCodec, StringCodec, connect, headers } from "nats";

const { NATS_URL = "nats://127.0.0.1:4222", JOB_STREAM: queue, JOB_CONSUMER: consumer } = process.env;
const json = JSONCodec();
const text = StringCodec();
const NO_MESSAGE = 10037;
const worker = `${hostname()}:${process.pid}`;

const client = await connect({ servers: NATS_URL, maxReconnectAttempts: -1, waitOnFirstConnect: true });
const jetstream = client.jetstream();
const manager = await client.jetstreamManager();
const { config } = await manager.consumers.info(queue, consumer);
const events = await manager.streams.find(`completed.${queue}.>`);
const storesAttempts = await manager.streams.find(`attempts.${queue}.>`).then(() => true, () => false);
if (config.ack_policy !== AckPolicy.Explicit) throw new Error(`expected a consumer with explicit acknowledgement`);

/** The job's place, of the subject for its acknowledgement; the time as text, since no Number holds it. */
function placeOf(message) {
  const tokens = message.reply.split(".");
  const [deliveries, sequence, , stored] = tokens.length === 9 ? tokens.slice(4) : tokens.slice(6);
  return { deliveries: Number(deliveries), sequence: Number(sequence), stored, began: Date.now() };
}

function idOf(message, sequence) {
  const header = (name, longest) => {
    const value = message.headers?.get(name);
    return value && !value.includes("\ufffd") && Buffer.byteLength(value) <= longest ? value : undefined;
  };
  const messageId = header("Nats-Msg-Id", 1000);
  return header("Job-Id", 10000) ?? bodyId(message) ?? (messageId?.startsWith("redrive:") ? undefined : messageId) ?? String(sequence);
}

function bodyId(message) {
  try {
    const body = message.data[0] === 0x7b ? json.decode(message.data) : {};
    const id = typeof body.id === "string" ? body.id : Number.isSafeInteger(body.id) ? String(body.id) : "";
    return id && Buffer.byteLength(id) <= 1000 ? id : undefined;
  } catch {
    return undefined;
  }
}

/** The cancellation of a job or of its id that was stored at the time of the job or later. */
async function cancellationOf(id, sequence, stored) {
  const byId = createHash("sha256").update(id, "utf8").digest("hex");
  return (await storedCancellation(byId, stored)) ?? (await storedCancellation(sequence, stored));
}

async function storedCancellation(token, stored) {
  try {
    const found = await manager.streams.getMessage(events, { last_by_subj: `cancelled.${queue}.${token}` });
    return nanosecondsOf(found.timestamp) >= BigInt(stored) ? json.decode(found.data) : undefined;
  } catch (error) {
    if (error.api_error?.err_code === NO_MESSAGE) return undefined;
    throw error;
  }
}

/** The milliseconds of a duration such as 1h30m, or of a bare number of seconds; undefined where the text is none. */
function millisecondsOf(duration) {
  const units = { ns: 1e-6, us: 1e-3, "µs": 1e-3, ms: 1, s: 1e3, m: 6e4, h: 3.6e6, d: 8.64e7, w: 6.048e8 };
  if (!duration || duration.length > 64) return undefined;
  if (/^\d+(\.\d+)?$/.test(duration)) return Number(duration) * 1000 || undefined;
  if (!/^(\d+(\.\d+)?(ns|us|µs|ms|[smhdw]))+$/.test(duration)) return undefined;
  const parts = [...duration.matchAll(/(\d+(?:\.\d+)?)(ns|us|µs|ms|[smhdw])/g)];
  return parts.reduce((sum, [, number, unit]) => sum + Number(number) * units[unit], 0) || undefined;
}

/** Whether a job comes too late; a redriven one that was stored after its expiry doesn't. */
function isExpired(message, stored) {
  const text = message.headers?.get("Job-Expires") ?? "";
  const expires = text.length > 64 ? NaN : Date.parse(/(Z|[+-]\d\d:\d\d)$/i.test(text) ? text : `${text}Z`);
  const isRedriven = /^[1-9]\d{0,17}$/.test(message.headers?.get("Redrive-Count") ?? "");
  return expires < Date.now() && !(isRedriven && BigInt(stored) > BigInt(expires) * 1_000_000n);
}

function nanosecondsOf(timestamp) {
  const [, seconds, decimals = ""] = /^([^.Z+]+)(?:\.(\d+))?Z$/.exec(timestamp);
  return BigInt(Date.parse(`${seconds}Z`)) * 1_000_000n + BigInt(decimals.padEnd(9, "0"));
}

/** Whether what is stored under the id of an end is an end of the same job: anybody may have used the id. */
async function isOwn({ stream, seq }, subject, { stream_seq }) {
  try {
    const found = await manager.streams.getMessage(stream, { seq });
    const end = json.decode(found.data);
    const isEnd = ["completion", "cancelled"].some((kind) => end.type === `io.airflow.jetstream.v1.${kind}`);
    return found.subject === subject && isEnd && end.stream === queue && end.consumer === consumer && end.stream_seq === stream_seq;
  } catch (error) {
    if (error instanceof SyntaxError || error.api_error || error.code === "BAD_JSON") return false;
    throw error;
  }
}

async function storeEnd(message, place, fields) {
  const set = headers();
  set.set("Nats-Msg-Id", `done:${queue}:${place.sequence}:${place.stored}`);
  for (const name of ["traceparent", "tracestate"]) {
    if (message.headers?.get(name)) set.set(name, message.headers.get(name));
  }
  const body = { timestamp: new Date().toISOString(), stream: queue, consumer, stream_seq: place.sequence, deliveries: place.deliveries, ...fields };
  const subject = `completed.${queue}.${consumer}.${place.sequence}`;
  const publish = () => jetstream.publish(subject, json.encode(body), { headers: set });
  await repeated(async () => {
    const ack = await publish();
    if (!ack.duplicate || (await isOwn(ack, subject, body))) return;
    set.set("Nats-Msg-Id", `${set.get("Nats-Msg-Id")}:${randomUUID()}`);
    await publish();
  });
  await repeated(() => message.ackAck());
}

async function repeated(request) {
  for (;;) {
    try {
      return await request();
    } catch (error) {
      console.error(`not confirmed, sending it again: ${error.message}`);
      await new Promise((resolve) => setTimeout(resolve, 500));
    }
  }
}

async function storeRecord(message, place, reason, explanation) {
  const set = headers();
  for (const [name, values] of message.headers ?? []) {
    if (!/^nats-/i.test(name) && !name.startsWith("Dead-Letter-")) values.forEach((value) => set.append(name, value));
  }
  set.set("Dead-Letter-Version", "1");
  set.set("Dead-Letter-Sequence", String(place.sequence));
  set.set("Dead-Letter-Subject", message.subject);
  set.set("Dead-Letter-Reason", reason);
  set.set("Dead-Letter-Explanation", explanation);
  await jetstream.publish(`dead.${queue}.${consumer}.${place.sequence}`, message.data, { headers: set });
}

/** What is known of an attempt, as subject and body; each message about it replaces the one before. */
function attemptOf({ sequence, deliveries }, fields) {
  const [type, timestamp] = ["io.airflow.jetstream.v1.attempt", new Date().toISOString()];
  const body = { type, timestamp, stream: queue, consumer, worker, stream_seq: sequence, deliveries, ...fields };
  return [`attempts.${queue}.${consumer}.${sequence}.${deliveries}`, json.encode(body)];
}

/** Says how far a job is: unconfirmed, and at most once a second. */
function reportProgress(place, fraction, text) {
  if (!storesAttempts || Date.now() - (place.reportedAt ?? 0) < 1000) return;
  place.reportedAt = Date.now();
  place.progress = { fraction, text: text.slice(0, 200) };
  client.publish(...attemptOf(place, place.progress));
}

/** Says how an attempt failed, before the job is handed back; that it isn't stored changes nothing else. */
async function storeFailure(place, error) {
  if (!storesAttempts) return;
  const [, name, module, line] = /at (?:async )?(\S+) \(.*?([^/\\]+)\.m?js:(\d+):\d+\)/.exec(error.stack) ?? [];
  const error_place = line && `${module}:${name}:${line}`;
  const said = { error_class: error.name, error_message: error.message.slice(0, 1000), error_place };
  // It replaces the progress, and so has that too.
  const fields = { ...place.progress, ...said, failed: true, seconds: (Date.now() - place.began) / 1000 };
  await jetstream.publish(...attemptOf(place, fields)).catch((problem) => console.error(`the error isn't stored: ${problem.message}`));
}

async function work(message) {
  const place = placeOf(message);
  const id = idOf(message, place.sequence);
  const cancelled = await cancellationOf(id, place.sequence, place.stored);
  if (cancelled) {
    const { why, by } = cancelled;
    return storeEnd(message, place, { type: "io.airflow.jetstream.v1.cancelled", id, job_id: id, why, by });
  }
  if (isExpired(message, place.stored)) {
    await storeRecord(message, place, "expired", "delivered after its Job-Expires");
    return message.term("expired");
  }
  const waits = config.backoff?.length ? config.backoff : [config.ack_wait];
  const wait = waits[Math.min(place.deliveries, waits.length) - 1];
  const progress = setInterval(() => message.working(), wait / 3_000_000);
  try {
    const result = await withinDeadline(run(message, place), message.headers?.get("Job-Deadline"));
    return await storeEnd(message, place, { type: "io.airflow.jetstream.v1.completion", id, job_id: id, result });
  } catch (error) {
    await storeFailure(place, error);
    if (!(error instanceof GiveUp)) return message.nak(1000);
    await storeRecord(message, place, "terminated", error.message);
    return message.term(error.message);
  } finally {
    clearInterval(progress);
  }
}

async function withinDeadline(attempt, deadline) {
  const limit = millisecondsOf(deadline);
  if (limit === undefined) return attempt;
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`not done within ${deadline}`)), Math.min(limit, 2 ** 31 - 1));
  });
  return Promise.race([attempt, late]).finally(() => clearTimeout(timer));
}

class GiveUp extends Error {}

/** What the worker is for: here it says what it was given, and fails where the job says so. */
async function run(message, place) {
  const job = text.decode(message.data);
  console.log(`job ${job}, delivery ${place.deliveries}`);
  if (job.startsWith("give up")) throw new GiveUp("the job says so");
  if (job.startsWith("fail")) throw new Error("the job says so");
  const [, seconds] = /^sleep ([\d.]+)/.exec(job) ?? [];
  for (let passed = 0; passed < Number(seconds ?? 0); passed += 0.5) {
    reportProgress(place, passed / Number(seconds), `${passed} of ${seconds} s`);
    await new Promise((resolve) => setTimeout(resolve, Math.min(500, (Number(seconds) - passed) * 1000)));
  }
  return { length: job.length };
}

console.log(`working on ${consumer} of ${queue}`);
for await (const message of await (await jetstream.consumers.get(queue, consumer)).consume({ max_messages: 1 })) {
  await work(message).catch((error) => console.error(`the job comes back after its wait: ${error.message}`));
}
