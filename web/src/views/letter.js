/** One dead letter: its cause of death, payload, origin, history and audit records. */

import { bodyAddress, getLetter } from "../api.js";
import { ActionButtons } from "../actions.js";
import { clock, exact, took } from "../format.js";
import { html, useState } from "../html.js";
import { Ago, Badge, Facts, Loading, Notice, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { groupsAddress, redriveAddress, storedJobAddress } from "../routing.js";
import { REASONS } from "../selection.js";
import { useMe } from "../session.js";
import { Actor } from "./actor.js";
import { AttemptList } from "./attempts.js";
import { EditDialog, notEditable } from "./edit.js";
import { Reason } from "./groups.js";
import { Headers } from "./headers.js";
import { Origin, jobName } from "./origin.js";
import { Payload } from "./payload.js";

/** @import { LetterDetail } from "../api_types" */

/** What became of a letter that is none any more. @type {Record<LetterDetail["state"], [string, "good" | "warn" | "bad" | "plain"]>} */
const STATES = {
  dead: ["dead", "bad"],
  parked: ["parked", "warn"],
  redriven: ["redriven", "good"],
  requeued: ["requeued", "good"],
  discarded: ["discarded", "warn"],
  handled: ["handled", "plain"],
  ended: ["ended", "plain"],
};

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
      html`<${Notice} tone="info" title=${`Nothing is known of letter ${sequence}`}>
        Neither the queue nor its audit has it. See <a href=${groupsAddress(connection, queue)}>the others</a>.
      <//>`
    }
    ${!gone && html`<${PollError} poll=${poll} />`}
    ${!detail && !poll.error && html`<${Loading} what="the letter" rows=${8} />`}
    ${detail && html`<${Letter} ...${{ connection, queue, detail, reload: poll.reload }} />`}
  `;
}

/** @param {{connection: string, queue: string, detail: LetterDetail, reload: () => void}} props */
function Letter({ connection, queue, detail, reload }) {
  const { letter, state } = detail;
  // The dialog outlives the letter: it says what became of it.
  const [editing, setEditing] = useState(false);
  const parked = state === "parked";
  const here = state === "dead" || parked;
  const undo = state === "discarded" ? detail.audit[0]?.discarded_by : null;
  const [word, tone] = STATES[state] ?? [state, "plain"];
  const select = { sequences: [letter.sequence], ...(parked ? { parked: true } : {}) };
  return html`
    <div class="queue-head">
      <h1 class="title">${jobName(letter)} <span class="aside">of ${queue}</span></h1>
      <${Reason} reason=${letter.reason} />
      ${state !== "dead" && html`<${Badge} tone=${tone} title=${letter.parked ?? undefined}>${word}<//>`}
    </div>
    ${
      !here &&
      html`<${Notice} tone="info" title=${`It isn't a dead letter any more: it was ${word}`}>
        ${detail.now}
        ${
          detail.next != null &&
          html` <a href=${storedJobAddress(connection, detail.next_queue ?? queue, detail.next)}>Job ${detail.next}${detail.next_queue ? ` of ${detail.next_queue}` : ""}</a>`
        }
      <//>`
    }
    <div class="toolbar spread">
      <p class="why">${why(detail)}</p>
      ${
        here &&
        html`<span class="act">
          <${EditButton} detail=${detail} open=${() => setEditing(true)} />
          <${ActionButtons} ...${{ connection, queue, select }} actions=${parked ? ["redrive", "discard"] : ["redrive", "park", "discard"]} what="this letter" main=${true} />
        </span>`
      }
      ${undo && html`<${ActionButtons} ...${{ connection, queue, select, undo }} actions=${["undo"]} what="of this letter" main=${true} />`}
    </div>
    ${editing && html`<${EditDialog} ...${{ connection, queue, detail, reload, close: () => setEditing(false) }} />`}
    <div class="letter">
      <div class="main">
        <section>
          <h2>Payload</h2>
          ${
            detail.source === null
              ? html`<p class="hint panel padded">Neither queue nor archive stores its body.</p>`
              : html`<${Payload} payload=${detail.payload} whole=${detail.payload && here && bodyAddress(connection, queue, letter.sequence)} />`
          }
        </section>
        ${detail.traceback.length > 0 && html`<section><h2>Traceback</h2><${Traceback} places=${detail.traceback} /></section>`}
        ${!detail.hidden && html`<section><h2>Headers</h2><${Headers} headers=${detail.headers} /></section>`}
      </div>
      <div class="side">
        <section><h2>Facts</h2><div class="panel padded"><${LetterFacts} ...${{ detail }} /></div></section>
        ${detail.tries.length > 0 && html`<section><h2>Attempts</h2><${AttemptList} attempts=${detail.tries} /></section>`}
        <section><h2>History</h2><${Attempts} attempts=${detail.attempts} /></section>
        <section><h2>Audit</h2><${AuditLog} ...${{ connection, queue, audit: detail.audit }} /></section>
      </div>
    </div>
  `;
}

function EditButton({ detail, open }) {
  const me = useMe();
  const reason = me.may_act ? notEditable(detail) : "Your role may view but not act.";
  return html`
    <button type="button" disabled=${Boolean(reason)} title=${reason ?? undefined} onClick=${open}>Edit and retry…</button>
  `;
}

function why({ letter, state, explanation }) {
  const text = letter.error_message ?? explanation;
  const name = letter.error_class && html`<strong>${letter.error_class}</strong>`;
  if (name && text) return html`${name}: ${text}`;
  const died = REASONS[letter.reason] ?? "died";
  const gone = state !== "dead" && state !== "parked";
  return name || text || `It ${died}; ${gone ? "no error was recorded before it was removed from the dead letter queue" : "no error was recorded"}.`;
}

const LetterFacts = ({ detail }) => {
  const { letter } = detail;
  return html`<${Facts}
    pairs=${[
      ["Published by", html`<${Origin} origin=${letter.origin} known=${letter.origin_known} full=${true} />`],
      ["Job id", letter.job_id === String(letter.sequence) ? "none" : html`<code>${letter.job_id}</code>`],
      ["Stream sequence", html`<code>${letter.sequence}</code>`],
      ["Subject", html`<code>${letter.subject}</code>`],
      ["Consumer", letter.consumer],
      ["Stored", detail.stored_at && clock(detail.stored_at)],
      ["First failure", detail.first_failed_at && clock(detail.first_failed_at)],
      ["Died", html`${clock(letter.died_at)}, <${Ago} time=${letter.died_at} />`],
      ["Deliveries", letter.deliveries && exact(letter.deliveries)],
      ["Redriven before", letter.redrives ? exact(letter.redrives) : "never"],
      ["Parked because", letter.parked],
      ["Worker", detail.worker],
      ["Last attempt took", detail.seconds != null && took(detail.seconds)],
      ["Failed at", letter.error_place && html`<code>${letter.error_place}</code>`],
      ["Fingerprint", html`<code>${letter.fingerprint}</code>`],
      ["Traceback digest", letter.traceback_digest && html`<code>${letter.traceback_digest}</code>`],
      ["Explanation", detail.explanation !== letter.error_message && detail.explanation],
      ["Body read from", { queue: "the queue", copy: "the dead letter queue", archive: "the archive" }[detail.source] ?? detail.source],
    ]}
  />`;
};

/** The handler's own functions, the outermost first, as Python writes them. @param {{places: string[]}} props */
const Traceback = ({ places }) => html`<pre class="panel padded" tabindex="0" aria-label="Traceback">${places
  .map((place) => place.split(":"))
  .map(([module, name, line]) => `${module}, line ${line}, in ${name}`)
  .join("\n")}</pre>`;

const Attempts = ({ attempts }) => html`
  <ol class="timeline panel">
    ${attempts.map(
      (item, index) => html`<li key=${index} class=${item.what}>
        <span>${item.text}${item.sequence != null && html` <span class="aside">job ${item.sequence}</span>`}</span>
        <time class="hint">${item.at ? clock(item.at) : "at an unknown time"}</time>
      </li>`,
    )}
  </ol>
`;

const AuditLog = ({ connection, queue, audit }) =>
  audit.length
    ? html`<ol class="timeline panel">
        ${audit.map(
          (item, index) => html`<li key=${index} class=${item.action}>
            <span>
              job ${item.sequence} <strong>${item.action}</strong>${item.new_sequence != null && ` as job ${item.new_sequence}`}${item.new_stream && ` of ${item.new_stream}`}
              ${item.why && html`, ${item.why}`} <${Actor} ...${item} />
              ${item.run && html` <a href=${redriveAddress(connection, queue, item.run)}>redrive</a>`}
              ${item.changes && html`<code class="changes">${JSON.stringify(item.changes)}</code>`}
            </span>
            <time class="hint">${clock(item.at)}</time>
          </li>`,
        )}
      </ol>`
    : html`<p class="hint panel padded">Nothing yet: it was never redriven, requeued or parked.</p>`;
