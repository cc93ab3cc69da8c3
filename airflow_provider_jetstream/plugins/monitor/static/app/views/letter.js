/** One dead letter: why it died, what it says, who made it, and what was done about it. */

import { AirflowLink, runAddress } from "../airflow.js";
import { getLetter } from "../api.js";
import { Act } from "../acting.js";
import { bytes, clock, exact } from "../format.js";
import { html } from "../html.js";
import { Ago, Badge, Copy, Facts, Loading, Notice, Stale } from "../parts.js";
import { usePoll } from "../polling.js";
import { groupsAddress } from "../routing.js";
import { REASONS } from "../selection.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";
import { Reason } from "./dead.js";
import { Origin, jobName } from "./origin.js";

/** The letter of a sequence. */
export function LetterView({ connection, queue, sequence }) {
  const me = useMe();
  const key = `${connection}/${queue}/${sequence}`;
  const poll = usePoll((signal) => getLetter(connection, queue, sequence, signal), Math.max(5, me.refresh_seconds), key);
  const found = poll.data;
  const gone = poll.error?.status === 404;
  return html`
    ${
      gone &&
      html`<${Notice} tone="good" title=${`Letter ${sequence} is no dead letter any more`}>
        It was redriven, or ended in another way. See <a href=${groupsAddress(connection, queue)}>the others</a>.
      <//>`
    }
    ${!gone && html`<${Stale} poll=${poll} />`}
    ${!found && !poll.error && html`<${Loading} what="the letter" rows=${8} />`}
    ${found && html`<${Found} ...${{ connection, queue, found, gone }} />`}
  `;
}

function Found({ connection, queue, found, gone }) {
  const { letter } = found;
  const select = { sequences: [letter.sequence], ...(letter.parked ? { parked: true } : {}) };
  return html`
    <div class="queue-head">
      <h1 class="title">${jobName(letter)} <span class="aside">seq ${letter.sequence} of ${queue}</span></h1>
      <${Reason} reason=${letter.reason} />
      ${letter.parked && html`<${Badge} tone="warn" title=${letter.parked}>parked<//>`}
    </div>
    <div class="toolbar spread">
      <p class="why">${why(found)}</p>
      ${!gone && html`<${Act} ...${{ connection, queue, select }} actions=${letter.parked ? ["redrive"] : ["redrive", "park"]} what="this letter" main=${true} />`}
    </div>
    <div class="letter">
      <div class="main">
        <section>
          <h2>Payload</h2>
          <${Body} found=${found} />
        </section>
        ${!found.hidden && html`<section><h2>Headers</h2><${Headers} headers=${found.headers} /></section>`}
      </div>
      <div class="side">
        <section><h2>Facts</h2><div class="panel padded"><${Known} ...${{ found }} /></div></section>
        <section><h2>What happened</h2><${Attempts} attempts=${found.attempts} /></section>
        <section><h2>What was done</h2><${Done} audit=${found.audit} /></section>
      </div>
    </div>
  `;
}

function why({ letter, explanation }) {
  const told = letter.error_message ?? explanation;
  const name = letter.error_class && html`<strong>${letter.error_class}</strong>`;
  if (name && told) return html`${name}: ${told}`;
  return name || told || `It ${REASONS[letter.reason] ?? "died"}; nobody told more.`;
}

function Body({ found }) {
  const { payload } = found;
  if (!payload) {
    return html`<${Notice} tone="warn" title="Payloads are hidden from your role">Ask an administrator of Airflow.<//>`;
  }
  const kinds = { json: "JSON", text: "Text", hex: "Binary" };
  return html`
    <div class="panel payload">
      <div class="bar-top">
        <${Badge}>${kinds[payload.kind]}<//> <span class="hint">${bytes(payload.size)}${payload.truncated ? ", only the beginning is shown" : ""}</span>
        <${Copy} text=${payload.text} what="the payload" />
      </div>
      ${payload.size ? html`<pre tabindex="0" aria-label="Payload">${payload.text}</pre>` : html`<p class="hint padded">The body is empty.</p>`}
    </div>
  `;
}

const headerColumns = [
  { key: "name", label: "Name", head: true, cell: ([name]) => html`<code>${name}</code>` },
  { key: "value", label: "Value", cell: ([, value]) => html`<code class="breaks">${value}</code>` },
];

const Headers = ({ headers }) =>
  headers.length
    ? html`<div class="panel"><${Table} caption="Headers" columns=${headerColumns}
        rows=${headers} rowKey=${(pair) => `${headers.indexOf(pair)}`} /></div>`
    : html`<p class="hint panel padded">None.</p>`;

const Known = ({ found }) => {
  const { letter } = found;
  return html`<${Facts}
    pairs=${[
      ["Published by", html`<${Origin} origin=${letter.origin} full=${true} />`],
      ["Job id", html`<code>${letter.job_id}</code>`],
      ["Subject", html`<code>${letter.subject}</code>`],
      ["Consumer", letter.consumer],
      ["Stored", found.stored_at && clock(found.stored_at)],
      ["First failure", found.first_failed_at && clock(found.first_failed_at)],
      ["Died", html`${clock(letter.died_at)}, <${Ago} time=${letter.died_at} />`],
      ["Deliveries", exact(letter.deliveries)],
      ["Redriven before", letter.redrives ? exact(letter.redrives) : "never"],
      ["Parked because", letter.parked],
      ["Failed at", letter.error_place && html`<code>${letter.error_place}</code>`],
      ["Fingerprint", html`<code>${letter.fingerprint}</code>`],
      ["Traceback digest", letter.traceback_digest && html`<code>${letter.traceback_digest}</code>`],
      ["Explanation", found.explanation !== letter.error_message && found.explanation],
      ["Body found in", { queue: "the queue", copy: "the dead letter queue", archive: "the archive" }[found.source] ?? found.source],
    ]}
  />`;
};

const Attempts = ({ attempts }) => html`
  <ol class="timeline panel">
    ${attempts.map(
      (each, index) => html`<li key=${index} class=${each.what}>
        <span>${each.text}${each.sequence != null && html` <span class="aside">seq ${each.sequence}</span>`}</span>
        <time class="hint">${each.at ? clock(each.at) : "at an unknown time"}</time>
      </li>`,
    )}
  </ol>
`;

const Done = ({ audit }) =>
  audit.length
    ? html`<ol class="timeline panel">
        ${audit.map(
          (each, index) => html`<li key=${index} class=${each.action}>
            <span>
              <strong>${each.action}</strong> seq ${each.sequence}${each.new_sequence != null && ` as ${each.new_sequence}`}
              ${each.why && html`, ${each.why}`} <${Doer} who=${each.who} />
            </span>
            <time class="hint">${clock(each.at)}</time>
          </li>`,
        )}
      </ol>`
    : html`<p class="hint panel padded">Nothing yet: it was never redriven, requeued or parked.</p>`;

function Doer({ who }) {
  if (who.dag_id && who.run_id) {
    return html`by <${AirflowLink} to=${runAddress(who.dag_id, who.run_id)} title=${who.run_id}>a run of ${who.dag_id}<//>`;
  }
  const told = Object.values(who).join(", ");
  return told ? `by ${told}` : null;
}
