/** Requests to the monitor and to Airflow; `docs/monitor-api.md` describes the answers. */

const TIMEOUT = 30_000;

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

  /** Whether the same request may succeed later. */
  get transient() {
    return this.status === 0 || this.status >= 500;
  }
}

/** Send a request, and return the JSON of its answer. */
async function request(path, { signal, body } = {}) {
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
    throw new ApiError(0, "unreachable", "Airflow doesn't answer. The page keeps trying.");
  }
  if (!answer.ok) throw await errorOf(answer);
  return answer.json();
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
const queuePath = (connection, queue) => `api/queues/${encode(connection)}/${encode(queue)}`;
const dagPath = (dagId) => `../api/v2/dags/${encode(dagId)}`;

export const getMe = (signal) => request("api/me", { signal });

export const getSnapshot = (signal) => request("api/snapshot", { signal });

export const getQueue = (connection, queue, signal) => request(queuePath(connection, queue), { signal });

/** @param {URLSearchParams} query the selection, and `group_by` */
export const getGroups = (connection, queue, query, signal) =>
  request(`${queuePath(connection, queue)}/groups?${query}`, { signal });

/** @param {URLSearchParams} query the selection, `after` and `limit` */
export const getLetters = (connection, queue, query, signal) =>
  request(`${queuePath(connection, queue)}/letters?${query}`, { signal });

export const getLetter = (connection, queue, sequence, signal) =>
  request(`${queuePath(connection, queue)}/letters/${encode(sequence)}`, { signal });

/** @param {URLSearchParams} query `dag_id`, `run_id`, `task_id`, `map_index` */
export const getJobs = (query, signal) => request(`api/jobs?${query}`, { signal });

export const dryRun = (connection, queue, select, action, signal) =>
  request(`${queuePath(connection, queue)}/dry-run`, { signal, body: { select, action } });

/** Trigger the DAG that acts, as the user who is logged in. */
export const triggerDag = (dagId, conf) => request(`${dagPath(dagId)}/dagRuns`, { body: { logical_date: null, conf } });

export const getDag = (dagId, signal) => request(dagPath(dagId), { signal });

export const getRun = (dagId, runId, signal) => request(`${dagPath(dagId)}/dagRuns/${encode(runId)}`, { signal });
