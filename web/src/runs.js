/** The DAG runs that the user has started on the page: polled until they end, and stored until the tab is closed. */

import { AirflowLink, dagAddress, runAddress } from "./airflow.js";
import { getDag, getRedrives, getResult, getRun } from "./api.js";
import { counted, exact } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { Notice } from "./components.js";
import { usePoll } from "./polling.js";
import { redriveAddress } from "./routing.js";
import { Steering, watched } from "./views/redrives.js";

/** @import { RedriveView } from "./api_types" */

const STORAGE_KEY = "jetstream-runs";
const MAX_RUNS = 8;
/** The task of the DAG that redrives. */
const TASK = "redrive";
/** @type {Record<Started["action"], string>} */
const PARTICIPLES = { redrive: "redriven", park: "parked", in_place: "requeued", discard: "discarded", undo: "brought back" };
const listeners = new Set();

/**
 * @typedef {object} Started
 * @property {string} dagId
 * @property {string} runId
 * @property {"redrive" | "park" | "in_place" | "discard" | "undo"} action
 * @property {string} connection
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
  const element = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const changed = () => {
      setRuns(storedRuns());
      // What somebody has just started goes on here.
      element.current?.scrollIntoView({ block: "nearest" });
    };
    listeners.add(changed);
    return () => listeners.delete(changed);
  }, []);
  return html`<div class="runs" aria-live="polite" ref=${element}>
    ${runs.map((run) => html`<${Run} key=${run.runId} run=${run} />`)}
  </div>`;
}

/**
 * What a run has done, as the redrive's record says, else as its task returned.
 *
 * @typedef {object} Outcome
 * @property {number} redriven
 * @property {number} parked
 * @property {number} discarded
 * @property {number} failed
 * @property {number | null} completed
 * @property {number | null} diedAgain
 * @property {number | null} running
 * @property {string | null} id of the redrive
 * @property {RedriveView} [redrive] the record
 */

/** @param {RedriveView} redrive @returns {Outcome} */
export const outcomeOf = (redrive) => ({
  redriven: redrive.redriven,
  parked: redrive.parked,
  discarded: redrive.discarded,
  failed: redrive.failed,
  completed: watched(redrive.outcomes) ? redrive.outcomes.completed : null,
  diedAgain: watched(redrive.outcomes) ? redrive.outcomes.died_again : null,
  running: watched(redrive.outcomes) ? redrive.outcomes.still_running : null,
  id: redrive.id,
  redrive,
});

/** @param {any} value what the task returned @returns {Outcome} */
export const outcomeOfResult = (value) => ({
  redriven: Number(value?.redriven ?? 0),
  parked: Number(value?.parked ?? 0),
  discarded: Number(value?.discarded ?? 0),
  failed: Number(value?.failed ?? 0),
  completed: null,
  diedAgain: null,
  running: null,
  id: null,
});

/** @param {Outcome} outcome @returns {"good" | "bad" | "info"} good only where every redriven job has completed since */
export function toneOf({ redriven, parked, failed, completed, diedAgain }) {
  if (failed || diedAgain) return "bad";
  return redriven > 0 && completed === redriven && !parked ? "good" : "info";
}

/** @param {Outcome} outcome @param {string} queue @param {Started["action"]} action @returns {string} what was done, as a sentence */
export function sentence({ redriven, parked, discarded, failed, completed, diedAgain, running }, queue, action) {
  const parks = action === "park" || action === "undo";
  const done = action === "discard" ? discarded : parks ? parked : redriven;
  const parts = [`${counted(done, "letter")} of ${queue} ${PARTICIPLES[action]}`];
  if (!parks && parked) parts.push(`${exact(parked)} parked`);
  if (failed) parts.push(`${exact(failed)} stayed dead letters`);
  if (completed != null) parts.push(`${exact(completed)} completed since`);
  if (diedAgain) parts.push(`${exact(diedAgain)} died again`);
  if (running) parts.push(`${exact(running)} still running`);
  return parts.join(", ");
}

function Run({ run }) {
  const { dagId, runId, connection, queue, action } = run;
  const [settled, setSettled] = useState(false);
  const poll = usePoll((signal) => runState(run, signal), settled ? 3600 : 1.5, runId);
  const state = poll.data?.state ?? "queued";
  const outcome = poll.data?.outcome;
  useEffect(() => {
    // The jobs of a redrive end after its run.
    if (state === "failed" || (state === "success" && outcome && !outcome.running)) setSettled(true);
  }, [state, outcome]);
  const link = html`<${AirflowLink} to=${runAddress(dagId, runId)}>run of ${dagId}<//>`;
  const close = html`<button type="button" class="quiet" onClick=${() => dismiss(runId)}>Dismiss</button>`;
  const tone = state === "failed" ? "bad" : outcome ? toneOf(outcome) : "info";
  return html`
    <${Notice} tone=${tone} actions=${close}>
      <span class="run" data-state=${state}>
        ${state === "success" && outcome && html`${sentence(outcome, queue, action)}, by the ${link}.`}
        ${state === "success" && !outcome && html`The ${link} has ended; what it did isn't known yet.`}
        ${state === "success" && outcome?.id && html` <a href=${redriveAddress(connection, queue, outcome.id)}>Its redrive</a>`}
        ${state === "failed" && html`The ${link} failed; its log says why.${outcome ? ` ${sentence(outcome, queue, action)}.` : ""} The other letters stay where they are.`}
        ${state === "running" && html`<${Spinner} /> Letters of ${queue} are being ${PARTICIPLES[action]}: the ${link} is running${outcome ? `; ${sentence(outcome, queue, action)} so far` : ""}.`}
        ${state === "running" && outcome?.id && html` <a href=${redriveAddress(connection, queue, outcome.id)}>Its redrive</a>`}
        ${state === "queued" && html`<${Spinner} /> The ${link} for ${counted(run.count, "letter")} of ${queue} is queued.`}
        ${outcome?.redrive && outcome.redrive.waves.length > 0 && html`<${Waves} ...${{ connection, queue, redrive: outcome.redrive, reload: poll.reload }} />`}
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

/** How a canary and its waves go, to their end. @param {{connection: string, queue: string, redrive: RedriveView, reload: () => void}} props */
const Waves = (props) => html`
  <ul class="notes" aria-label="Waves">${props.redrive.waves.map((wave) => html`<li key=${wave.number}>${waveSentence(wave, props.redrive)}</li>`)}</ul>
  <${Steering} ...${props} />
`;

/** @param {RedriveView["waves"][number]} wave @param {RedriveView} redrive @returns {string} */
export function waveSentence({ number, state, redriven, outcomes, reason }, { waves, letters }) {
  const ended = outcomes.completed + outcomes.died_again;
  const what = number === 1 && waves.length > 0 ? `the first ${counted(redriven, "letter")}` : `${counted(redriven, "letter")} more`;
  if (state === "redriving") return `Wave ${number}: ${what} so far`;
  if (state === "awaiting") return `Wave ${number}: ${exact(ended)} of ${what} ended, ${exact(outcomes.completed)} of them completed`;
  const done = `Wave ${number}: ${exact(outcomes.completed)} of ${what} completed${outcomes.died_again ? `, ${exact(outcomes.died_again)} died again` : ""}`;
  if (state !== "at_gate") return done;
  const before = waves.reduce((count, wave) => count + wave.redriven, 0);
  const rest = letters == null || letters <= before ? "the others" : `the other ${exact(letters - before)}`;
  return `${done}. It has stopped here: ${reason}. Redrive ${rest}?`;
}

/** @param {Started} run */
async function runState(run, signal) {
  const { dagId, runId } = run;
  const { state } = await getRun(dagId, runId, signal);
  const paused = state === "queued" && (await getDag(dagId, signal)).is_paused;
  return { state, paused, outcome: state === "queued" ? null : await outcomeOfRun(run, state, signal) };
}

/** @param {Started} run @returns {Promise<Outcome | null>} */
async function outcomeOfRun({ dagId, runId, connection, queue }, state, signal) {
  const query = new URLSearchParams({ dag_id: dagId, run_id: runId });
  try {
    const [redrive] = (await getRedrives(connection, queue, query, signal)).redrives;
    if (redrive) return outcomeOf(redrive);
  } catch (error) {
    if (signal?.aborted) throw error;
  }
  // A queue without an audit of redrives: then the task's own report.
  if (state !== "success") return null;
  return getResult(dagId, runId, TASK, signal).then(({ value }) => outcomeOfResult(typeof value === "string" ? JSON.parse(value) : value), () => null);
}

const Spinner = () => html`<span class="spinner" aria-hidden="true"></span>`;
