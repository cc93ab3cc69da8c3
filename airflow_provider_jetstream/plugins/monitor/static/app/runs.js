/** The DAG runs that the user has started on the page: polled until they end, and stored until the tab is closed. */

import { AirflowLink, dagAddress, runAddress } from "./airflow.js";
import { getDag, getRun } from "./api.js";
import { counted } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { Notice } from "./components.js";
import { usePoll } from "./polling.js";

const STORAGE_KEY = "jetstream-runs";
const MAX_RUNS = 3;
const PARTICIPLES = { redrive: "redriven", park: "parked", in_place: "requeued" };
const listeners = new Set();

/**
 * @typedef {object} Started
 * @property {string} dagId
 * @property {string} runId
 * @property {"redrive" | "park" | "in_place"} action
 * @property {string} queue
 * @property {number} count how many letters the dry run counted
 */

/** @returns {Started[]} newest first */
function storedRuns() {
  try {
    return JSON.parse(sessionStorage.getItem(STORAGE_KEY) ?? "[]");
  } catch {
    return [];
  }
}

function storeRuns(runs) {
  sessionStorage.setItem(STORAGE_KEY, JSON.stringify(runs.slice(0, MAX_RUNS)));
  for (const listener of listeners) listener(runs);
}

/** @param {Started} run */
export const addRun = (run) => storeRuns([run, ...storedRuns()]);

const dismiss = (runId) => storeRuns(storedRuns().filter((run) => run.runId !== runId));

/** The runs, above every view. */
export function Runs() {
  const [runs, setRuns] = useState(storedRuns);
  useEffect(() => {
    const changed = () => setRuns(storedRuns());
    listeners.add(changed);
    return () => listeners.delete(changed);
  }, []);
  return html`<div class="runs" aria-live="polite">
    ${runs.map((run) => html`<${Run} key=${run.runId} run=${run} />`)}
  </div>`;
}

const TONES = { success: "good", failed: "bad" };

function Run({ run }) {
  const { dagId, runId } = run;
  const [ended, setEnded] = useState(false);
  const poll = usePoll((signal) => runState(dagId, runId, signal), ended ? 3600 : 1.5, runId);
  const state = poll.data?.state ?? "queued";
  useEffect(() => {
    if (state === "success" || state === "failed") setEnded(true);
  }, [state]);
  const letters = counted(run.count, "letter");
  const link = html`<${AirflowLink} to=${runAddress(dagId, runId)}>run of ${dagId}<//>`;
  const close = html`<button type="button" class="quiet" onClick=${() => dismiss(runId)}>Dismiss</button>`;
  return html`
    <${Notice} tone=${TONES[state] ?? "info"} actions=${close}>
      <span class="run" data-state=${state}>
        ${state === "success" && html`${letters} of ${run.queue} ${PARTICIPLES[run.action]} by the ${link}.`}
        ${state === "failed" && html`The ${link} failed; its log says why. The other letters stay where they are.`}
        ${state === "running" && html`<${Spinner} /> ${letters} of ${run.queue} being ${PARTICIPLES[run.action]}: the ${link} is running.`}
        ${state === "queued" && html`<${Spinner} /> The ${link} for ${letters} of ${run.queue} is queued.`}
        ${
          poll.data?.paused &&
          html` The DAG is paused: nothing happens until you unpause it
            <${AirflowLink} to=${dagAddress(dagId)}>in Airflow<//>.`
        }
        ${poll.error && html` ${poll.error.message}`}
      </span>
    <//>
  `;
}

async function runState(dagId, runId, signal) {
  const { state } = await getRun(dagId, runId, signal);
  return { state, paused: state === "queued" && (await getDag(dagId, signal)).is_paused };
}

const Spinner = () => html`<span class="spinner" aria-hidden="true"></span>`;
