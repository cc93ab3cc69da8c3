/** Redrives of a queue, and one of them: its waves, their outcomes, and pause, resume and abort. */

import { ActionButtons } from "../actions.js";
import { getRedrive, getRedrives, steerRedrive } from "../api.js";
import { NONE, clock, counted, exact, percent, rate, shortened } from "../format.js";
import { html, useState } from "../html.js";
import { Ago, Badge, Empty, Facts, Failure, Loading, Modal, Notice, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { letterAddress, redriveAddress } from "../routing.js";
import { describe } from "../selection.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";
import { Actor } from "./actor.js";
import { planOf } from "./plan.js";
import { QueueHead, useQueue } from "./queue_head.js";

/** @import { RedriveView as Redrive, WaveView as Wave, OutcomesView as Outcomes } from "../api_types" */
/** @import { ApiError } from "../api.js" */

/** @type {Record<Redrive["state"], ["good" | "bad" | "warn" | "info" | "plain", string]>} */
const STATES = {
  planned: ["plain", "Planned"],
  running: ["info", "Running"],
  paused: ["warn", "Paused"],
  at_gate: ["warn", "At a gate"],
  aborted: ["warn", "Aborted"],
  finished: ["plain", "Finished"],
  failed: ["bad", "Failed"],
};
/** @type {Record<string, ["good" | "warn" | "info" | "plain", string]>} */
const WAVES = { redriving: ["info", "redriving"], awaiting: ["info", "awaiting ends"], at_gate: ["warn", "at the gate"], passed: ["good", "passed"] };
/** What a person can do in each state. @type {Partial<Record<Redrive["state"], ("pause" | "resume" | "abort")[]>>} */
const STEPS = {
  planned: ["pause", "abort"],
  running: ["pause", "abort"],
  paused: ["resume", "abort"],
  at_gate: ["resume", "abort"],
  failed: ["abort"],
};
const LABELS = { pause: "Pause", resume: "Resume", abort: "Abort" };
const MEANINGS = {
  pause: "The letters that are being redriven are finished; then it waits until somebody resumes it.",
  resume: "It goes on with the next letters.",
  abort: "It ends. What was redriven stays redriven; the other letters stay dead letters.",
};

/** @param {Outcomes} outcomes @returns {boolean} whether anything is known of what became of the jobs */
export const watched = ({ completed, died_again, still_running, unknown }) => completed + died_again + still_running + unknown > 0;

/** @param {Redrive} redrive @returns {number} how many letters became jobs: one that died again and was brought back counts once */
const lettersOf = ({ redriven, waves }) => redriven - waves.reduce((count, wave) => count + wave.brought_again, 0);

/** @param {Redrive} redrive @returns {"good" | "bad" | "warn" | "info" | "plain"} good only where every job has completed since */
export function outcomeTone(redrive) {
  const { completed, died_again: diedAgain } = redrive.outcomes;
  if (diedAgain || redrive.failed || redrive.state === "failed") return "bad";
  if (redrive.state === "at_gate") return "warn";
  if (redrive.state === "running" || redrive.state === "planned") return "info";
  return completed > 0 && completed === lettersOf(redrive) ? "good" : "plain";
}

const StateOf = ({ redrive }) => {
  const [tone, word] = STATES[redrive.state] ?? ["plain", redrive.state];
  return html`<${Badge} tone=${tone}>${word}<//>`;
};

/** All redrives that the audit knows. */
export function RedrivesView({ connection, queue, query }) {
  const me = useMe();
  const head = useQueue(connection, queue);
  const poll = usePoll((signal) => getRedrives(connection, queue, query, signal), me.refresh_seconds, `${connection}/${queue}?${query}`);
  const columns = [
    {
      key: "at", label: "Began", head: true,
      cell: (item) => html`<a class="name" href=${redriveAddress(connection, queue, item.id)}>${clock(item.began_at)}</a>`,
    },
    { key: "state", label: "State", cell: (item) => html`<${StateOf} redrive=${item} />` },
    { key: "who", label: "By", wide: true, cell: (item) => html`<span class="long"><${Actor} ...${item} /></span>` },
    { key: "why", label: "Why", wide: true, cell: (item) => html`<span class="error-text">${item.why ?? NONE}</span>` },
    { key: "redriven", label: "Redriven", numeric: true, cell: (item) => exact(item.redriven) },
    { key: "completed", label: "Completed", numeric: true, hint: "Of the redriven ones, since", cell: (item) => seen(item.outcomes, "completed") },
    { key: "died", label: "Died again", numeric: true, cell: (item) => html`<${Died} outcomes=${item.outcomes} />` },
    { key: "running", label: "Running", numeric: true, hint: "Pending or in flight", cell: (item) => seen(item.outcomes, "still_running") },
    { key: "parked", label: "Parked", numeric: true, cell: (item) => exact(item.parked) },
    { key: "discarded", label: "Discarded", numeric: true, cell: (item) => exact(item.discarded) },
    { key: "failed", label: "Stayed dead", numeric: true, cell: (item) => exact(item.failed) },
  ];
  return html`
    <${QueueHead} ...${{ connection, queue }} poll=${head} tab="redrives" />
    <${PollError} poll=${poll} />
    ${!poll.data && !poll.error && html`<${Loading} what="the redrives" />`}
    ${
      poll.data &&
      (poll.data.redrives.length
        ? html`<div class="panel"><${Table} caption="Redrives" columns=${columns} rows=${poll.data.redrives} rowKey=${(item) => item.id} /></div>`
        : poll.data.not_shown === 0 && html`<${Empty} title="No redrive yet">The audit of this queue has none.<//>`)
    }
    ${poll.data && poll.data.not_shown > 0 && html`<p class="hint">${counted(poll.data.not_shown, "redrive")} of DAGs that you may not see aren't shown.</p>`}
  `;
}

/** One redrive, live. */
export function RedriveView({ connection, queue, id }) {
  const me = useMe();
  const head = useQueue(connection, queue);
  const poll = usePoll((signal) => getRedrive(connection, queue, id, signal), me.refresh_seconds, `${connection}/${queue}/${id}`);
  const redrive = poll.data;
  return html`
    <${QueueHead} ...${{ connection, queue }} poll=${head} tab="redrives" />
    <${PollError} poll=${poll} />
    ${!redrive && !poll.error && html`<${Loading} what="the redrive" rows=${6} />`}
    ${redrive && html`<${Details} ...${{ connection, queue, redrive, reload: poll.reload }} />`}
  `;
}

/** @param {Outcomes} outcomes @param {keyof Outcomes} name */
const seen = (outcomes, name) => (watched(outcomes) ? exact(outcomes[name]) : NONE);

const Died = ({ outcomes }) => html`<span class=${outcomes.died_again ? "number-bad" : ""}>${seen(outcomes, "died_again")}</span>`;

/** @param {{connection: string, queue: string, redrive: Redrive, reload: () => void}} props */
function Details({ connection, queue, redrive, reload }) {
  const { outcomes } = redrive;
  const failures = Object.entries(redrive.failures);
  const note = (name) => (watched(outcomes) ? shareOf(outcomes[name], lettersOf(redrive)) : "not known");
  return html`
    <div class="toolbar spread">
      <h2 class="redrive-title">Redrive <span class="aside">${redrive.id}</span> <${StateOf} redrive=${redrive} /></h2>
      <${Steering} ...${{ connection, queue, redrive, reload }} />
      ${redrive.discarded > 0 && html`<${ActionButtons} ...${{ connection, queue, undo: redrive.id }} select=${{}} actions=${["undo"]} what="of this redrive" main=${true} />`}
    </div>
    <${Notice} tone=${outcomeTone(redrive)}>${redrive.summary}${redrive.reason && !redrive.summary.includes(redrive.reason) && html`; ${redrive.reason}`}<//>
    <${Progress} redrive=${redrive} />
    <dl class="tiles">
      <${Tile} name="Redriven" value=${exact(redrive.redriven)} note=${redrive.rate == null ? "" : rate(redrive.rate)} />
      <${Tile} name="Completed after redrive" value=${seen(outcomes, "completed")} note=${note("completed")} tone=${outcomes.completed ? "good" : ""} />
      <${Tile} name="Died again" value=${seen(outcomes, "died_again")} note=${note("died_again")} tone=${outcomes.died_again ? "bad" : ""} />
      <${Tile} name="Still running" value=${seen(outcomes, "still_running")} note=${outcomes.unknown ? `${exact(outcomes.unknown)} unknown` : "pending or in flight"} />
      ${redrive.discarded > 0 && html`<${Tile} name="Discarded" value=${exact(redrive.discarded)} note="a copy brings them back" />`}
      <${Tile} name="Parked" value=${exact(redrive.parked)} note=${`${exact(redrive.failed)} stayed dead letters`} />
    </dl>
    ${redrive.waves.length > 0 && html`<h2>Waves</h2><div class="panel"><${Table} caption="Waves" columns=${waveColumns} rows=${redrive.waves} rowKey=${(wave) => wave.number} /></div>`}
    <div class="columns">
      <section>
        <h2>Facts</h2>
        <div class="panel padded">
          <${Facts}
            pairs=${[
              ["Started", html`<${Actor} ...${redrive} />`],
              ["Why", redrive.why],
              ["Began", html`${clock(redrive.began_at)}, <${Ago} time=${redrive.began_at} />`],
              ["As of", html`<${Ago} time=${redrive.at} />`],
              ["Selected", redrive.letters == null ? null : `about ${counted(redrive.letters, "letter")}`],
              ["Letters", redrive.hidden ? "not shown: some may be of DAGs that you may not see" : describe(redrive.selection)],
              ["Gone before", redrive.gone ? counted(redrive.gone, "letter") : null],
              ...planOf(redrive.plan),
            ]}
          />
        </div>
      </section>
      <section>
        <h2>What people asked</h2>
        ${
          redrive.controls.length
            ? html`<ol class="timeline panel" aria-label="Controls">
                ${redrive.controls.map(
                  (control, index) => html`<li key=${index}>
                    <span><strong>${control.action}</strong> by ${control.who}${control.why && `, ${control.why}`} ${!control.obeyed && html`<${Badge} tone="warn">not read yet<//>`}</span>
                    <time class="hint">${clock(control.at)}</time>
                  </li>`,
                )}
              </ol>`
            : html`<p class="hint panel padded">Nothing.</p>`
        }
        <h2>Stayed dead letters</h2>
        ${
          failures.length
            ? html`<ul class="timeline panel">${failures.map(([sequence, why]) => html`<li key=${sequence}><span><a href=${letterAddress(connection, queue, sequence)}>letter ${sequence}</a>: ${why}</span></li>`)}</ul>`
            : html`<p class="hint panel padded">None.</p>`
        }
      </section>
    </div>
  `;
}

/** @param {number} part @param {number} whole */
const shareOf = (part, whole) => (whole ? percent(part / whole) : "");

const Tile = ({ name, value, note, tone = "" }) => html`
  <div class="tile ${tone}"><dt>${name}</dt><dd><strong>${value}</strong><span>${note}</span></dd></div>
`;

/** How many of the selected letters were redriven, while it runs. @param {{redrive: Redrive}} props */
function Progress({ redrive }) {
  const done = redrive.redriven + redrive.parked + redrive.discarded + redrive.failed + redrive.gone;
  if (!redrive.letters || redrive.state === "finished" || redrive.state === "aborted") return null;
  return html`<progress class="progress" aria-label=${`${exact(done)} of ${counted(redrive.letters, "letter")}`} max=${Math.max(done, redrive.letters)} value=${done}></progress>`;
}

/** @type {import("../table.js").Column[]} */
const waveColumns = [
  { key: "number", label: "Wave", head: true, cell: (wave) => html`<span class="whole">Wave ${wave.number}</span>` },
  { key: "size", label: "Size", numeric: true, cell: (wave) => (wave.size == null ? "the rest" : exact(wave.size)) },
  { key: "state", label: "State", cell: (wave) => html`<${Badge} tone=${WAVES[wave.state]?.[0] ?? "plain"}>${WAVES[wave.state]?.[1] ?? wave.state}<//>` },
  { key: "redriven", label: "Redriven", numeric: true, cell: (wave) => exact(wave.redriven) },
  { key: "completed", label: "Completed", numeric: true, cell: (wave) => exact(wave.outcomes.completed) },
  { key: "died", label: "Died again", numeric: true, cell: (wave) => html`<${Died} outcomes=${wave.outcomes} />` },
  { key: "running", label: "Running", numeric: true, cell: (wave) => exact(wave.outcomes.still_running) },
  { key: "unknown", label: "Unknown", numeric: true, hint: "Nothing tells how they ended", cell: (wave) => exact(wave.outcomes.unknown) },
  { key: "parked", label: "Parked", numeric: true, hint: "With those that were parked at the gate", cell: (wave) => exact(wave.parked + wave.parked_again) },
  {
    key: "causes", label: "Died again of", wide: true,
    cell: (wave) => wave.died_of.map((cause) => html`<span key=${cause.fingerprint} class="error-text" title=${cause.error}>${exact(cause.count)} × ${shortened(cause.error, 160)}</span>`),
  },
  { key: "gate", label: "Gate", wide: true, cell: (wave) => html`<span class="gate">${wave.reason || NONE}${wave.passed_by && wave.passed_by !== "rule" && `, passed by ${wave.passed_by}`}</span>` },
];

/** @param {{connection: string, queue: string, redrive: Redrive, reload: () => void}} props */
export function Steering({ connection, queue, redrive, reload }) {
  const me = useMe();
  const [step, setStep] = useState(/** @type {"pause" | "resume" | "abort" | null} */ (null));
  const steps = STEPS[redrive.state] ?? [];
  if (!steps.length) return null;
  if (!me.may_act) return html`<span class="hint">Your role may view but not act.</span>`;
  return html`
    <span class="act">
      ${steps.map((name) => html`<button key=${name} type="button" class=${name === "resume" ? "primary" : ""} onClick=${() => setStep(name)}>${LABELS[name]}…</button>`)}
    </span>
    ${step && html`<${SteerDialog} key=${step} ...${{ connection, queue, redrive, step, reload, close: () => setStep(null) }} />`}
  `;
}

function SteerDialog({ connection, queue, redrive, step, reload, close }) {
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [sending, setSending] = useState(false);
  const confirm = async (event) => {
    event.preventDefault();
    const fields = new FormData(event.currentTarget);
    const why = String(fields.get("why") ?? "").trim() || null;
    setSending(true);
    try {
      await steerRedrive(connection, queue, redrive.id, step, why, fields.has("park_returned"));
      reload();
      close();
    } catch (problem) {
      setError(problem);
      setSending(false);
    }
  };
  return html`
    <${Modal} title=${`${LABELS[step]} this redrive`} close=${close}>
      <form onSubmit=${confirm}>
        <p>${MEANINGS[step]}</p>
        ${
          step === "resume" &&
          redrive.state === "at_gate" &&
          html`<label class="check"><input type="checkbox" name="park_returned" /> Park the letters of this wave that died again</label>`
        }
        <label>Why <span class="hint">recorded in the audit, with your name</span><input name="why" maxlength="200" autocomplete="off" /></label>
        ${error && html`<${Failure} error=${error} reload=${() => setError(null)} />`}
        <div class="buttons">
          <button type="button" onClick=${close}>Cancel</button>
          <button type="submit" class="primary" disabled=${sending}>${LABELS[step]}</button>
        </div>
      </form>
    <//>
  `;
}
