/** One dead letter: its cause of death, payload, origin, history and audit records. */

import { AirflowLink, runAddress } from "../airflow.js";
import { getLetter } from "../api.js";
import { ActionButtons } from "../actions.js";
import { bytes, clock, exact } from "../format.js";
import { html } from "../html.js";
import { Ago, Badge, Copy, Facts, Loading, Notice, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { groupsAddress } from "../routing.js";
import { REASONS } from "../selection.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";
import { Reason } from "./groups.js";
import { Origin, jobName } from "./origin.js";

/** The letter with a sequence. */
export function LetterView({ connection, queue, sequence }) {
  const me = useMe();
  const key = `${connection}/${queue}/${sequence}`;
  const poll = usePoll((signal) => getLetter(connection, queue, sequence, signal), Math.max(5, me.refresh_seconds), key);
  const detail = poll.data;
  const gone = poll.error?.status === 404;
  return html`
    ${
      gone &&
      html`<${Notice} tone="good" title=${`Letter ${sequence} is no dead letter any more`}>
        It was redriven, or ended in another way. See <a href=${groupsAddress(connection, queue)}>the others</a>.
      <//>`
    }
    ${!gone && html`<${PollError} poll=${poll} />`}
    ${!detail && !poll.error && html`<${Loading} what="the letter" rows=${8} />`}
    ${detail && html`<${Letter} ...${{ connection, queue, detail, gone }} />`}
  `;
}

function Letter({ connection, queue, detail, gone }) {
  const { letter } = detail;
  const select = { sequences: [letter.sequence], ...(letter.parked ? { parked: true } : {}) };
  return html`
    <div class="queue-head">
      <h1 class="title">${jobName(letter)} <span class="aside">seq ${letter.sequence} of ${queue}</span></h1>
      <${Reason} reason=${letter.reason} />
      ${letter.parked && html`<${Badge} tone="warn" title=${letter.parked}>parked<//>`}
    </div>
    <div class="toolbar spread">
      <p class="why">${why(detail)}</p>
      ${!gone && html`<${ActionButtons} ...${{ connection, queue, select }} actions=${letter.parked ? ["redrive"] : ["redrive", "park"]} what="this letter" main=${true} />`}
    </div>
    <div class="letter">
      <div class="main">
        <section>
          <h2>Payload</h2>
          <${Body} detail=${detail} />
        </section>
        ${!detail.hidden && html`<section><h2>Headers</h2><${Headers} headers=${detail.headers} /></section>`}
      </div>
      <div class="side">
        <section><h2>Facts</h2><div class="panel padded"><${LetterFacts} ...${{ detail }} /></div></section>
        <section><h2>History</h2><${Attempts} attempts=${detail.attempts} /></section>
        <section><h2>Audit</h2><${AuditLog} audit=${detail.audit} /></section>
      </div>
    </div>
  `;
}

function why({ letter, explanation }) {
  const text = letter.error_message ?? explanation;
  const name = letter.error_class && html`<strong>${letter.error_class}</strong>`;
  if (name && text) return html`${name}: ${text}`;
  return name || text || `It ${REASONS[letter.reason] ?? "died"}; no error was recorded.`;
}

function Body({ detail }) {
  const { payload } = detail;
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

const LetterFacts = ({ detail }) => {
  const { letter } = detail;
  return html`<${Facts}
    pairs=${[
      ["Published by", html`<${Origin} origin=${letter.origin} full=${true} />`],
      ["Job id", html`<code>${letter.job_id}</code>`],
      ["Subject", html`<code>${letter.subject}</code>`],
      ["Consumer", letter.consumer],
      ["Stored", detail.stored_at && clock(detail.stored_at)],
      ["First failure", detail.first_failed_at && clock(detail.first_failed_at)],
      ["Died", html`${clock(letter.died_at)}, <${Ago} time=${letter.died_at} />`],
      ["Deliveries", exact(letter.deliveries)],
      ["Redriven before", letter.redrives ? exact(letter.redrives) : "never"],
      ["Parked because", letter.parked],
      ["Failed at", letter.error_place && html`<code>${letter.error_place}</code>`],
      ["Fingerprint", html`<code>${letter.fingerprint}</code>`],
      ["Traceback digest", letter.traceback_digest && html`<code>${letter.traceback_digest}</code>`],
      ["Explanation", detail.explanation !== letter.error_message && detail.explanation],
      ["Body read from", { queue: "the queue", copy: "the dead letter queue", archive: "the archive" }[detail.source] ?? detail.source],
    ]}
  />`;
};

const Attempts = ({ attempts }) => html`
  <ol class="timeline panel">
    ${attempts.map(
      (item, index) => html`<li key=${index} class=${item.what}>
        <span>${item.text}${item.sequence != null && html` <span class="aside">seq ${item.sequence}</span>`}</span>
        <time class="hint">${item.at ? clock(item.at) : "at an unknown time"}</time>
      </li>`,
    )}
  </ol>
`;

const AuditLog = ({ audit }) =>
  audit.length
    ? html`<ol class="timeline panel">
        ${audit.map(
          (item, index) => html`<li key=${index} class=${item.action}>
            <span>
              <strong>${item.action}</strong> seq ${item.sequence}${item.new_sequence != null && ` as ${item.new_sequence}`}${item.new_stream && ` of ${item.new_stream}`}
              ${item.why && html`, ${item.why}`} <${Actor} who=${item.who} />
            </span>
            <time class="hint">${clock(item.at)}</time>
          </li>`,
        )}
      </ol>`
    : html`<p class="hint panel padded">Nothing yet: it was never redriven, requeued or parked.</p>`;

function Actor({ who }) {
  if (who.dag_id && who.run_id) {
    return html`by <${AirflowLink} to=${runAddress(who.dag_id, who.run_id)} title=${who.run_id}>a run of ${who.dag_id}<//>`;
  }
  const fields = Object.values(who).join(", ");
  return fields ? `by ${fields}` : null;
}
