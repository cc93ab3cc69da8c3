/** What the page asks the monitor and Airflow for; `docs/monitor-api.md` says what they answer. */

const TIMEOUT = 30_000;

/** An answer that isn't one, with what to tell the person. */
export class ApiError extends Error {
  /**
   * @param {number} status HTTP status; 0 where nothing answered
   * @param {string} code stays the same
   * @param {string} message for people
   */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }

  /** Whether the same question may be answered later. */
  get passing() {
    return this.status === 0 || this.status >= 500;
  }
}

/** Ask, and give the JSON that comes back. */
async function ask(path, { signal, body } = {}) {
  const limit = AbortSignal.timeout(TIMEOUT);
  const init = { signal: signal ? AbortSignal.any([signal, limit]) : limit, credentials: "same-origin" };
  if (body !== undefined) {
    Object.assign(init, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  }
  let answer;
  try {
    answer = await fetch(path, init);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "Airflow doesn't answer. The page goes on asking.");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

async function refusal(answer) {
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

const part = encodeURIComponent;
const queuePath = (connection, queue) => `api/queues/${part(connection)}/${part(queue)}`;
const dagPath = (dagId) => `../api/v2/dags/${part(dagId)}`;

export const getMe = (signal) => ask("api/me", { signal });

export const getSnapshot = (signal) => ask("api/snapshot", { signal });

export const getQueue = (connection, queue, signal) => ask(queuePath(connection, queue), { signal });

/** @param {URLSearchParams} query the selection, and `group_by` */
export const getGroups = (connection, queue, query, signal) =>
  ask(`${queuePath(connection, queue)}/groups?${query}`, { signal });

/** @param {URLSearchParams} query the selection, `after` and `limit` */
export const getLetters = (connection, queue, query, signal) =>
  ask(`${queuePath(connection, queue)}/letters?${query}`, { signal });

export const getLetter = (connection, queue, sequence, signal) =>
  ask(`${queuePath(connection, queue)}/letters/${part(sequence)}`, { signal });

/** @param {URLSearchParams} query `dag_id`, `run_id`, `task_id`, `map_index` */
export const getJobs = (query, signal) => ask(`api/jobs?${query}`, { signal });

export const dryRun = (connection, queue, select, action, signal) =>
  ask(`${queuePath(connection, queue)}/dry-run`, { signal, body: { select, action } });

/** Have Airflow start the DAG that acts, as the person who is logged in. */
export const triggerDag = (dagId, conf) => ask(`${dagPath(dagId)}/dagRuns`, { body: { logical_date: null, conf } });

export const getDag = (dagId, signal) => ask(dagPath(dagId), { signal });

export const getRun = (dagId, runId, signal) => ask(`${dagPath(dagId)}/dagRuns/${part(runId)}`, { signal });
