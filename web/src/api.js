/** Requests to the monitor and to Airflow; `docs/monitor-api.md` describes the answers. */

import { base } from "./place.js";

const TIMEOUT = 30_000;
const SEARCH_TIMEOUT = 180_000;

/** What a server refuses until a person changes it. */
export const REFUSALS = new Set(["JS101", "JS102", "JS103", "JS106", "connection"]);

/** An answer takes longer than a proxy waits; it goes on. */
const COUNTING = new Set(["JS202"]);

/** A failed request, with a message for the user. */
export class ApiError extends Error {
  /**
   * @param {number} status HTTP status; 0 where nothing answered
   * @param {string} code stays the same between releases
   * @param {string} message for the user
   */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }

  /** Whether the same request may succeed later, without a person. */
  get transient() {
    return (this.status === 0 || this.status >= 500) && !REFUSALS.has(this.code);
  }
}

/**
 * Send a request, and return the JSON of its answer.
 *
 * @param {string} path
 * @param {{signal?: AbortSignal, body?: unknown}} [options]
 * @returns {Promise<any>}
 */
async function request(path, options) {
  return (await answerOf(path, options)).json();
}

/**
 * @param {string} path relative to the page's own address
 * @param {{signal?: AbortSignal, body?: unknown, timeout?: number}} [options]
 */
async function answerOf(path, { signal, body, timeout = TIMEOUT } = {}) {
  const limit = AbortSignal.timeout(timeout);
  /** @type {RequestInit} */
  const init = { signal: signal ? AbortSignal.any([signal, limit]) : limit, credentials: "same-origin" };
  if (body !== undefined) {
    Object.assign(init, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  }
  let answer;
  try {
    answer = await fetch(new URL(path, base), init);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "Airflow doesn't answer. The page keeps trying.");
  }
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

async function errorOf(answer) {
  let detail;
  try {
    detail = (await answer.json()).detail;
  } catch {
    detail = undefined;
  }
  if (detail?.message) return new ApiError(answer.status, detail.code, detail.message);
  const text = typeof detail === "string" ? detail : `The answer was ${answer.status} ${answer.statusText}.`;
  return new ApiError(answer.status, String(answer.status), text);
}

const encode = encodeURIComponent;
/** @import { QueueDetail, Groups, LetterPage, LetterDetail, TaskJobs, Snapshot, Me, DryRun } from "./api_types" */
/** @import { Account } from "./api_types" */
/** @import { RedriveList, RedriveView, JobPage, JobDetail, EditResult, ConsumerPaused, JobAsked } from "./api_types" */

const queuePath = (connection, queue) => `api/queues/${encode(connection)}/${encode(queue)}`;
const dagPath = (dagId) => `../api/v2/dags/${encode(dagId)}`;

/** @returns {Promise<Me>} */
export const getMe = (signal) => request("api/me", { signal });

/** @returns {Promise<Snapshot>} */
export const getSnapshot = (signal) => request("api/snapshot", { signal });

/** @returns {Promise<QueueDetail>} */
export const getQueue = (connection, queue, signal) => request(queuePath(connection, queue), { signal });

/**
 * @param {URLSearchParams} query the selection, and `group_by`
 * @returns {Promise<Groups>}
 */
export const getGroups = (connection, queue, query, signal) =>
  request(`${queuePath(connection, queue)}/groups?${query}`, { signal });

/**
 * @param {URLSearchParams} query the selection, `sort`, `offset` and `limit`
 * @returns {Promise<LetterPage>}
 */
export const getLetters = (connection, queue, query, signal) =>
  request(`${queuePath(connection, queue)}/letters?${query}`, { signal });

/** @returns {Promise<Account>} the last one */
export const getAccount = (connection, queue, signal) => request(`${queuePath(connection, queue)}/account`, { signal });

/** @returns {Promise<Account>} a new one */
export const makeAccount = (connection, queue) => request(`${queuePath(connection, queue)}/account`, { body: {} });

const letterPath = (connection, queue, sequence) => `${queuePath(connection, queue)}/letters/${encode(sequence)}`;

/** @returns {Promise<LetterDetail>} */
export const getLetter = (connection, queue, sequence, signal) => request(letterPath(connection, queue, sequence), { signal });

/** @returns {string} the address of a letter's bytes, as a file */
export const bodyAddress = (connection, queue, sequence) =>
  new URL(`${letterPath(connection, queue, sequence)}/body`, base).href;

/** @returns {Promise<EditResult>} what an edit changes; without `dry_run`, the letter is redriven with it */
export const editLetter = (connection, queue, sequence, edit) =>
  request(`${letterPath(connection, queue, sequence)}/edit`, { body: edit });

/**
 * Ask until the letters are counted: an answer that takes long is joined by the same request.
 *
 * @param {() => Promise<any>} ask
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
async function patiently(ask, signal) {
  for (;;) {
    try {
      return await ask();
    } catch (error) {
      if (signal?.aborted || !COUNTING.has(error.code)) throw error;
    }
  }
}

/** @returns {Promise<any>} */
export const getDiagnosis = (connection, queue, query, signal) =>
  patiently(() => request(`${queuePath(connection, queue)}/diagnosis?${query}`, { signal }), signal);

/** @returns {Promise<RedriveList>} */
export const getRedrives = (connection, queue, query, signal) =>
  request(`${queuePath(connection, queue)}/redrives?${query}`, { signal });

/** @returns {Promise<RedriveView>} */
export const getRedrive = (connection, queue, id, signal) =>
  request(`${queuePath(connection, queue)}/redrives/${encode(id)}`, { signal });

/**
 * @param {"pause" | "resume" | "abort"} action
 * @returns {Promise<RedriveView>}
 */
export const steerRedrive = (connection, queue, id, action, why, parkReturned = false) =>
  request(`${queuePath(connection, queue)}/redrives/${encode(id)}/${action}`, { body: { why, ...(parkReturned ? { park_returned: true } : {}) } });

/**
 * @param {URLSearchParams} query `state`, `consumer`, `after`, `limit`
 * @returns {Promise<JobPage>}
 */
export const getStoredJobs = (connection, queue, query, signal) =>
  request(`${queuePath(connection, queue)}/jobs?${query}`, { signal });

/** @returns {Promise<JobDetail>} */
export const getStoredJob = (connection, queue, sequence, signal) =>
  request(`${queuePath(connection, queue)}/jobs/${encode(sequence)}`, { signal });

/** @param {"retry" | "give-up"} action @returns {Promise<JobAsked>} */
export const askForJob = (connection, queue, sequence, action, why) =>
  request(`${queuePath(connection, queue)}/jobs/${encode(sequence)}/${action}`, { body: { why } });

/** @returns {Promise<ConsumerPaused>} */
export const pauseConsumer = (connection, queue, consumer, seconds, why) =>
  request(`${queuePath(connection, queue)}/consumers/${encode(consumer)}/pause`, { body: { seconds, why } });

/** @returns {Promise<ConsumerPaused>} */
export const resumeConsumer = (connection, queue, consumer, why) =>
  request(`${queuePath(connection, queue)}/consumers/${encode(consumer)}/resume`, { body: { why } });

/**
 * Search letters, and report each line of the answer as it comes.
 *
 * @param {URLSearchParams} query `text`, `where`, `after`, `limit`, and the selection
 * @param {(line: any) => void} onLine a `Found`, `Progress` or `SearchEnd`
 */
export async function searchLetters(connection, queue, query, onLine, signal) {
  const answer = await answerOf(`${queuePath(connection, queue)}/search?${query}`, { signal, timeout: SEARCH_TIMEOUT });
  const reader = /** @type {ReadableStream<Uint8Array>} */ (answer.body).pipeThrough(/** @type {any} */ (new TextDecoderStream())).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value ?? "")).split("\n");
    rest = done ? "" : /** @type {string} */ (lines.pop());
    for (const line of lines) if (line) onLine(JSON.parse(line));
    if (done) return;
  }
}

/**
 * @param {URLSearchParams} query `dag_id`, `run_id`, `task_id`, `map_index`
 * @returns {Promise<TaskJobs>}
 */
export const getJobs = (query, signal) => request(`api/jobs?${query}`, { signal });

/** @returns {Promise<DryRun>} */
export const dryRun = (connection, queue, select, action, signal, more = {}) =>
  patiently(() => request(`${queuePath(connection, queue)}/dry-run`, { signal, body: { select, action, ...more } }), signal);

/** Trigger the DAG that acts, as the user who is logged in. */
export const triggerDag = (dagId, conf) => request(`${dagPath(dagId)}/dagRuns`, { body: { logical_date: null, conf } });

export const getDag = (dagId, signal) => request(dagPath(dagId), { signal });

/** @returns {Promise<{params?: Record<string, unknown> | null}>} with the parameters of its runs */
export const getDagDetails = (dagId, signal) => request(`${dagPath(dagId)}/details`, { signal });

export const getRun = (dagId, runId, signal) => request(`${dagPath(dagId)}/dagRuns/${encode(runId)}`, { signal });

/** @returns {Promise<{value: any}>} what a task of a run returned */
export const getResult = (dagId, runId, taskId, signal) =>
  request(`${dagPath(dagId)}/dagRuns/${encode(runId)}/taskInstances/${encode(taskId)}/xcomEntries/return_value?deserialize=false`, { signal });
