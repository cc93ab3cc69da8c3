/** The DAG runs that this person has started from here: followed until they end, and kept while the tab lives. */

import { AirflowLink, dagAddress, runAddress } from "./airflow.js";
import { getDag, getRun } from "./api.js";
import { counted } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { Notice } from "./parts.js";
import { usePoll } from "./polling.js";

const KEPT = "jetstream-runs";
const SHOWN = 3;
const DONE = { redrive: "redriven", park: "parked", in_place: "requeued" };
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
function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
  } catch {
    return [];
  }
}

function keep(runs) {
  sessionStorage.setItem(KEPT, JSON.stringify(runs.slice(0, SHOWN)));
  for (const listener of listeners) listener(runs);
}

/** @param {Started} run */
export const addRun = (run) => keep([run, ...kept()]);

const dismiss = (runId) => keep(kept().filter((run) => run.runId !== runId));

/** The runs, above every view. */
export function Runs() {
  const [runs, setRuns] = useState(kept);
  useEffect(() => {
    const changed = () => setRuns(kept());
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
  const poll = usePoll((signal) => look(dagId, runId, signal), ended ? 3600 : 1.5, runId);
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
        ${state === "success" && html`${letters} of ${run.queue} ${DONE[run.action]} by the ${link}.`}
        ${state === "failed" && html`The ${link} failed; its log says why. Letters it didn't treat stay where they are.`}
        ${state === "running" && html`<${Spinner} /> ${letters} of ${run.queue} being ${DONE[run.action]}: the ${link} is running.`}
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

async function look(dagId, runId, signal) {
  const { state } = await getRun(dagId, runId, signal);
  return { state, paused: state === "queued" && (await getDag(dagId, signal)).is_paused };
}

const Spinner = () => html`<span class="spinner" aria-hidden="true"></span>`;
