/** What is about to be done: counted first, then done by a DAG run that Airflow authorises and audits. */

import { ApiError, dryRun, triggerDag } from "./api.js";
import { LABELS, useIntent, withdraw } from "./acting.js";
import { counted, exact } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { Badge, Failure, Loading } from "./parts.js";
import { addRun } from "./runs.js";
import { inWords } from "./selection.js";
import { useMe } from "./session.js";

const SAYS = {
  redrive: "Bring these dead letters back as jobs with fresh deliveries.",
  park: "Take these letters out of circulation. They are kept whole, and can be redriven from there.",
  in_place:
    "Pause the consumers, wait until nothing is in flight, and hand out every dead letter of the queue again as it is. " +
    "No copies are made, so it works in a full queue too.",
};

/** The dialog, where there is something to confirm. */
export function Confirmation() {
  const intent = useIntent();
  return intent && html`<${Confirm} key=${intent.number} ...${intent} />`;
}

function Confirm({ connection, queue, select, action, number }) {
  const me = useMe();
  const dialog = useRef(null);
  const [found, setFound] = useState();
  const [error, setError] = useState();
  const [round, setRound] = useState(0);
  const [sending, setSending] = useState(false);
  const label = LABELS[action];
  useEffect(() => {
    dialog.current.showModal();
    dialog.current.querySelector("input").focus();
  }, []);
  useEffect(() => {
    const asked = new AbortController();
    setFound(undefined);
    setError(undefined);
    dryRun(connection, queue, select, action, asked.signal).then(setFound, (problem) => {
      if (!asked.signal.aborted) setError(problem);
    });
    return () => asked.abort();
  }, [round]);
  const letters = found ? found.parked + (action === "park" ? 0 : found.redriven) : 0;
  const confirm = async (event) => {
    event.preventDefault();
    const { why, rate } = Object.fromEntries(new FormData(event.currentTarget));
    setSending(true);
    try {
      const conf = { ...found.conf, why: why.trim() || null, rate: rate ? Number(rate) : null };
      const run = await triggerDag(me.dag_id, conf);
      addRun({ dagId: me.dag_id, runId: run.dag_run_id, action, queue, count: letters });
      dialog.current.close();
    } catch (problem) {
      setError(refused(problem, me.dag_id));
      setSending(false);
    }
  };
  return html`
    <dialog ref=${dialog} class="dialog" aria-labelledby="act-title" onClose=${() => withdraw(number)}>
      <form onSubmit=${confirm}>
        <h2 id="act-title">${label}</h2>
        <p>${SAYS[action]}</p>
        <p class="what"><${Badge}>${queue}<//> ${inWords(select)}</p>
        <div class="counted" aria-live="polite">
          ${!found && !error && html`<${Loading} what="the count" rows=${2} />`}
          ${error && html`<${Failure} error=${error} reload=${() => setRound(round + 1)} />`}
          ${found && !error && html`<${Counted} found=${found} action=${action} letters=${letters} />`}
        </div>
        <label>
          Why <span class="hint">goes into the audit</span>
          <input name="why" autocomplete="off" maxlength="200" placeholder="the bank is back, ticket 4711" />
        </label>
        ${
          action !== "in_place" &&
          html`<label>
            At most, letters a second <span class="hint">empty for all speed</span>
            <input name="rate" type="number" min="0.1" step="any" inputmode="decimal" />
          </label>`
        }
        <div class="buttons">
          <button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
          <button type="submit" class="primary" disabled=${!letters || sending}>
            ${sending ? "Starting…" : `${label} ${found ? counted(letters, "letter") : ""}`}
          </button>
        </div>
      </form>
    </dialog>
  `;
}

function Counted({ found, action, letters }) {
  const notes = [
    action === "redrive" && found.parked && `${counted(found.parked, "letter")} of them were redriven too often and would be parked.`,
    found.failed && `${counted(found.failed, "letter")} would stay where they are: ${Object.values(found.failures)[0]}`,
    found.uncertain && `${exact(found.uncertain)} more may be dead, which can't be told yet.`,
    found.undeliverable && `${counted(found.undeliverable, "job")} are taken by no consumer, and aren't touched.`,
    ...found.risks,
  ].filter(Boolean);
  if (!letters) {
    return html`<p class="number"><strong>0</strong> letters match now: there is nothing to do.</p>
      <${Notes} notes=${notes} />`;
  }
  return html`
    <p class="number"><strong>${exact(letters)}</strong> ${letters === 1 ? "letter matches" : "letters match"} now</p>
    ${action !== "park" && html`<p class="hint">Protocol ${found.protocol}: ${found.guarantee}</p>`}
    <${Notes} notes=${notes} />
  `;
}

const Notes = ({ notes }) =>
  notes.length ? html`<ul class="notes">${notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>` : null;

function refused(problem, dagId) {
  const says = {
    403: `Airflow doesn't let you trigger the DAG ${dagId}.`,
    404: `Airflow doesn't know the DAG ${dagId}, which does the work. docs/monitor.md says how to install it.`,
  }[problem.status];
  return says ? new ApiError(problem.status, problem.code, says) : problem;
}
