/** The dialog of an action: a dry run counts the letters, then a DAG run acts, which Airflow authorizes and audits. */

import { ApiError, dryRun, getDagDetails, triggerDag } from "./api.js";
import { LABELS, closeDialog, usePendingAction } from "./actions.js";
import { counted, exact } from "./format.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Badge, Failure, Loading, Notice } from "./components.js";
import { Advice, isAgainst } from "./views/diagnosis.js";
import { addRun } from "./runs.js";
import { REASONS, describe } from "./selection.js";
import { useMe } from "./session.js";
import { jobName } from "./views/origin.js";

/** @import { DryRun } from "./api_types" */

const DESCRIPTIONS = {
  redrive: "Redrive these dead letters: each becomes a job with fresh deliveries.",
  park: "Take these letters out of circulation. They are stored unchanged, and can be redriven later.",
  discard: "Drop these letters, with the reason in the audit. Undo it as long as a copy is stored; a letter without one stays.",
  undo: "Bring discarded letters back, parked: nothing runs until you redrive them. See first whether their jobs were published again.",
  in_place:
    "Pause the consumers, wait until nothing is in flight, and deliver every dead letter of the queue again, unchanged. " +
    "Nothing is copied, so it works in a full queue too.",
};

/** Sizes of waves, as a person writes them. */
export const WAVES = "\\s*\\d+(\\s*,\\s*\\d+)*(\\s*,\\s*rest)?\\s*";

/**
 * @param {string | undefined} sizes such as "10, 100, rest"
 * @param {string | undefined} share in per cent
 * @returns {{waves?: (number | "rest")[], stop_when?: number}} fields of a run's configuration
 */
export function wavesOf(sizes, share) {
  const names = (sizes ?? "").split(",").map((name) => name.trim()).filter(Boolean);
  if (!names.length) return {};
  const waves = names.map((name) => (name === "rest" ? /** @type {const} */ ("rest") : Number(name)));
  return { waves, stop_when: Number(share || 20) / 100 };
}

const CANARY = 10;
const SAMPLES = 5;

/** @param {DryRun} counts @param {number} letters @returns {string} ten first, then the others: all at once only where somebody chooses that */
export const canaryOf = (counts, letters) => (counts.awaits_ends && letters > CANARY ? `${CANARY}, rest` : "");

/** Whether the DAG takes waves: a deployment's own one may be older. */
function useWaves(dagId, action) {
  const [known, setKnown] = useState(false);
  useEffect(() => {
    const controller = new AbortController();
    if (action === "redrive") {
      getDagDetails(dagId, controller.signal).then(
        ({ params }) => setKnown(Boolean(params && "waves" in params)),
        () => {},
      );
    }
    return () => controller.abort();
  }, []);
  return known;
}

/** @param {DryRun} counts @param {string} action @returns {number} how many letters it would change */
export const lettersOf = ({ redriven, parked, discarded }, action) =>
  action === "discard" ? discarded : parked + (action === "redrive" || action === "in_place" ? redriven : 0);

/** The dialog, if an action waits for confirmation. */
export function Confirmation() {
  const action = usePendingAction();
  return action && action.action !== "edit" && html`<${Dialog} key=${action.number} ...${action} />`;
}

/** @param {import("./actions.js").PendingAction & {action: Exclude<import("./actions.js").Action, "edit">, number: number}} props */
function Dialog({ connection, queue, select, others = [], action, advice, undo, number }) {
  const me = useMe();
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [all, setAll] = useState(/** @type {DryRun[] | undefined} */ (undefined));
  const [error, setError] = useState(/** @type {ApiError | undefined} */ (undefined));
  const [round, setRound] = useState(0);
  const [sending, setSending] = useState(false);
  const waves = useWaves(me.dag_id, action);
  const targets = [{ connection, queue, select }, ...others];
  const started = useRef(new Set());
  const label = LABELS[action];
  useEffect(() => {
    dialog.current?.showModal();
    dialog.current?.querySelector("input")?.focus();
  }, []);
  useEffect(() => {
    const controller = new AbortController();
    setAll(undefined);
    setError(undefined);
    const more = undo ? { undo } : {};
    Promise.all(targets.map((target) => dryRun(target.connection, target.queue, target.select, action, controller.signal, more))).then(setAll, (problem) => {
      if (!controller.signal.aborted) setError(problem);
    });
    return () => controller.abort();
  }, [round]);
  const counts = useMemo(() => all && together(all), [all]);
  const letters = counts ? lettersOf(counts, action) : 0;
  const confirm = async (event) => {
    event.preventDefault();
    const { why, rate, sizes, share } = /** @type {Record<string, string>} */ (Object.fromEntries(new FormData(event.currentTarget)));
    if (!all) return;
    setSending(true);
    try {
      for (const [index, target] of targets.entries()) {
        const count = lettersOf(all[index], action);
        // A run that was started isn't started again after another one couldn't be.
        if (!count || started.current.has(index)) continue;
        const conf = { ...all[index].conf, why: why.trim() || null, rate: rate ? Number(rate) : null, ...wavesOf(sizes, share) };
        const run = await triggerDag(me.dag_id, conf);
        started.current.add(index);
        addRun({ dagId: me.dag_id, runId: run.dag_run_id, connection: target.connection, action, queue: target.queue, count });
      }
      dialog.current?.close();
    } catch (problem) {
      setError(explained(problem, me.dag_id));
      setSending(false);
    }
  };
  return html`
    <dialog ref=${dialog} class="dialog" aria-labelledby="act-title" onClose=${() => closeDialog(number)}>
      <form onSubmit=${confirm}>
        <h2 id="act-title">${label}</h2>
        <p>${DESCRIPTIONS[action]}</p>
        ${action === "redrive" && isAgainst(advice) && html`<${Notice} tone="warn" title="They would probably die again"><${Advice} advice=${advice} /><//>`}
        ${action === "redrive" && advice && !isAgainst(advice) && html`<div class="hint"><${Advice} advice=${advice} /></div>`}
        ${targets.map(
          (target, index) => html`<p class="what" key=${index}><${Badge}>${target.queue}<//> ${describe(target.select)}${
            all && targets.length > 1 ? `: ${counted(lettersOf(all[index], action), "letter")}` : ""
          }</p>`,
        )}
        <div class="counted" aria-live="polite">
          ${!counts && !error && html`<${Loading} what="the count" rows=${2} />`}
          ${error && html`<${Failure} error=${error} reload=${() => setRound(round + 1)} />`}
          ${counts && !error && html`<${Counts} counts=${counts} action=${action} letters=${letters} />`}
        </div>
        <label>
          Why <span class="hint">recorded in the audit</span>
          <input name="why" autocomplete="off" maxlength="200" placeholder="the bank is back, ticket 4711" />
        </label>
        ${
          action !== "in_place" &&
          html`<label>
            Letters a second, at most <span class="hint">empty for no limit</span>
            <input name="rate" type="number" min="0.1" step="any" inputmode="decimal" />
          </label>`
        }
        ${
          waves &&
          counts &&
          html`<fieldset class="waves">
            <legend>Canary and waves</legend>
            <label>
              Sizes <span class="hint">${counts.awaits_ends ? "empty for all at once" : "the queue stores no ends of jobs, so that a canary would wait at its gate"}</span>
              <input name="sizes" autocomplete="off" defaultValue=${canaryOf(counts, letters)} placeholder="10, 100, rest" pattern=${WAVES} title="Numbers with commas between them, and rest as the last one" />
            </label>
            <label>
              Stop where more died again than, % <input name="share" type="number" min="0" max="100" value="20" />
            </label>
          </fieldset>`
        }
        <div class="buttons">
          <button type="button" onClick=${() => dialog.current?.close()}>Cancel</button>
          <button type="submit" class="primary" disabled=${!letters || sending}>
            ${sending ? "Starting…" : `${label} ${counts ? counted(letters, "letter") : ""}`}
          </button>
        </div>
      </form>
    </dialog>
  `;
}

/** @param {DryRun[]} all @returns {DryRun} the counts of several queues as those of one */
function together([first, ...rest]) {
  const sum = { ...first };
  for (const counts of rest) {
    for (const name of /** @type {const} */ (["redriven", "parked", "discarded", "failed", "uncertain", "undeliverable"])) sum[name] += counts[name];
    sum.failures = { ...sum.failures, ...counts.failures };
    sum.risks = [...new Set([...sum.risks, ...counts.risks])];
    sum.samples = [...sum.samples, ...counts.samples];
    sum.awaits_ends = sum.awaits_ends && counts.awaits_ends;
  }
  return { ...sum, samples: sum.samples.slice(0, SAMPLES) };
}

/** Some of the letters, so that a person sees whether they are the right ones. @param {{samples: DryRun["samples"]}} props */
const Samples = ({ samples }) => html`
  <ul class="samples" aria-label="Some of these letters">
    ${samples.map(
      (letter, index) => html`<li key=${index}><strong>${jobName(letter)}</strong> <span class="aside">${
        letter.error_class ? `${letter.error_class.split(".").at(-1)}${letter.error_place ? ` in ${letter.error_place}` : ""}` : (REASONS[letter.reason] ?? letter.reason)
      }</span></li>`,
    )}
  </ul>
`;

function Counts({ counts, action, letters }) {
  const notes = [
    action === "redrive" && counts.parked && `${counted(counts.parked, "letter")} of them were redriven too often and would be parked.`,
    counts.failed && `${counted(counts.failed, "letter")} would stay where they are: ${Object.values(counts.failures)[0]}`,
    counts.uncertain && `${exact(counts.uncertain)} more may be dead; that isn't proved yet.`,
    counts.undeliverable && `${counted(counts.undeliverable, "job")} match no consumer's filter, and aren't touched.`,
    ...counts.risks,
  ].filter(Boolean);
  if (!letters) {
    return html`<p class="number"><strong>0</strong> letters match now.</p>
      <${Notes} notes=${notes} />`;
  }
  return html`
    <p class="number"><strong>${exact(letters)}</strong> ${letters === 1 ? "letter matches" : "letters match"} now</p>
    ${counts.samples.length > 0 && html`<${Samples} samples=${counts.samples} />`}
    <${Notes} notes=${notes} />
    ${(action === "redrive" || action === "in_place") && html`<details class="hint"><summary>What is guaranteed</summary>${counts.guarantee}</details>`}
  `;
}

const Notes = ({ notes }) =>
  notes.length ? html`<ul class="notes">${notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>` : null;

/** An error of triggering the DAG, with what to do about it. */
export function explained(problem, dagId) {
  const message = {
    403: `Airflow doesn't let you trigger the DAG ${dagId}.`,
    404: `Airflow has no DAG ${dagId}, which carries out actions. docs/monitor.md says how to install it.`,
  }[problem.status];
  return message ? new ApiError(problem.status, problem.code, message) : problem;
}
