/** The dialog that changes many letters by a JSON Patch: it shows the difference of samples, then a DAG run redrives them with it. */

import { dryRun, getDagDetails, triggerDag } from "./api.js";
import { WAVES, explained, wavesOf } from "./confirmation.js";
import { closeDialog, usePendingAction } from "./actions.js";
import { counted, exact } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { Badge, Failure, Loading, Modal, Notice } from "./components.js";
import { addRun } from "./runs.js";
import { describe } from "./selection.js";
import { useMe } from "./session.js";
import { Lines } from "./views/edit.js";
import { jobName } from "./views/origin.js";

/** @import { DryRun } from "./api_types" */
/** @import { ApiError } from "./api.js" */

const EXAMPLE = '[\n  {"op": "test", "path": "/currency", "value": "usd"},\n  {"op": "replace", "path": "/currency", "value": "EUR"}\n]';

/**
 * @param {string} text
 * @returns {string | null} why it is no patch, as far as that shows without the server; `null` if it may be one
 */
export function patchProblem(text) {
  try {
    return Array.isArray(JSON.parse(text)) ? null : "A patch is a JSON array of operations.";
  } catch (error) {
    return `This is no JSON: ${/** @type {Error} */ (error).message}`;
  }
}

/** The dialog, if it is open. */
export function EditMany() {
  const action = usePendingAction();
  return action?.action === "edit" && html`<${Dialog} key=${action.number} ...${action} />`;
}

function Dialog({ connection, queue, select, number }) {
  const me = useMe();
  const [patch, setPatch] = useState("");
  const [counts, setCounts] = useState(/** @type {DryRun | null} */ (null));
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [problem, setProblem] = useState(/** @type {string | null} */ (null));
  const [busy, setBusy] = useState(false);
  const [knows, setKnows] = useState(/** @type {Record<string, unknown> | null} */ (null));
  const close = () => closeDialog(number);
  useEffect(() => {
    const controller = new AbortController();
    getDagDetails(me.dag_id, controller.signal).then(({ params }) => setKnows(params ?? {}), () => {});
    return () => controller.abort();
  }, []);
  const show = async () => {
    const wrong = patchProblem(patch);
    setProblem(wrong);
    setCounts(null);
    setError(null);
    if (wrong) return;
    setBusy(true);
    try {
      setCounts(await dryRun(connection, queue, select, "redrive", undefined, { patch }));
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  };
  const redrive = async (form) => {
    const { why, rate, sizes, share } = /** @type {Record<string, string>} */ (Object.fromEntries(new FormData(form)));
    if (!counts) return;
    setBusy(true);
    try {
      const conf = { ...counts.conf, why: why.trim() || null, rate: rate ? Number(rate) : null, ...wavesOf(sizes, share) };
      const run = await triggerDag(me.dag_id, conf);
      addRun({ dagId: me.dag_id, runId: run.dag_run_id, connection, action: "redrive", queue, count: counts.redriven });
      close();
    } catch (failure) {
      setError(explained(failure, me.dag_id));
      setBusy(false);
    }
  };
  const submit = (event) => {
    event.preventDefault();
    if (counts) redrive(event.currentTarget);
    else show();
  };
  const older = knows && !("patch" in knows);
  return html`
    <${Modal} title="Edit and retry many letters" close=${close} wide=${true}>
      <form onSubmit=${submit}>
        <p class="what"><${Badge}>${queue}<//> ${describe(select)}</p>
        ${older && html`<${Notice} tone="warn" title=${`The DAG ${me.dag_id} takes no patch`}>It is of an earlier version: see docs/monitor.md.<//>`}
        <label>JSON Patch <span class="hint">RFC 6902; what no operation addresses stays byte for byte, and a letter that doesn't fit isn't touched</span>
          <textarea name="patch" rows="7" spellcheck="false" placeholder=${EXAMPLE} value=${patch}
            onInput=${(event) => { setPatch(event.currentTarget.value); setCounts(null); setProblem(null); }}></textarea>
        </label>
        <div class="counted" aria-live="polite">
          ${problem && html`<${Notice} tone="bad">${problem}<//>`}
          ${busy && !counts && html`<${Loading} what="the difference" rows=${2} />`}
          ${error && html`<${Failure} error=${error} reload=${show} />`}
          ${counts && html`<${Changes} counts=${counts} />`}
        </div>
        <label>Why <span class="hint">recorded in the audit, with the patch</span>
          <input name="why" maxlength="200" autocomplete="off" />
        </label>
        <label>Letters a second, at most <span class="hint">empty for no limit</span>
          <input name="rate" type="number" min="0.1" step="any" inputmode="decimal" />
        </label>
        <fieldset class="waves">
          <legend>Canary and waves</legend>
          <label>Sizes <span class="hint">empty for all at once</span>
            <input name="sizes" autocomplete="off" placeholder="10, 100, rest" pattern=${WAVES} title="Numbers with commas between them, and rest as the last one" />
          </label>
          <label>Stop where more died again than, % <input name="share" type="number" min="0" max="100" value="20" /></label>
        </fieldset>
        <div class="buttons">
          <button type="button" onClick=${close}>Cancel</button>
          <button type="submit" class="primary" disabled=${busy || Boolean(older) || (counts !== null && !counts.redriven)}>
            ${counts ? `Redrive ${counted(counts.redriven, "letter")} with this change` : "Show the difference"}
          </button>
        </div>
      </form>
    <//>
  `;
}

/** @param {{counts: DryRun}} props */
function Changes({ counts }) {
  const notes = [
    counts.redriven > counts.changed && `${counted(counts.redriven - counts.changed, "letter")} would come back as they are: the patch changes nothing in them.`,
    counts.parked && `${counted(counts.parked, "letter")} were redriven too often and would be parked.`,
    ...Object.entries(counts.causes).map(([cause, times]) => `${counted(times, "letter")} would stay: ${cause}`),
    counts.uncertain && `${exact(counts.uncertain)} more may be dead; that isn't proved yet.`,
    ...counts.risks,
  ].filter(Boolean);
  return html`
    <p class="number"><strong>${exact(counts.changed)}</strong> ${counts.changed === 1 ? "letter" : "letters"} would change, ${exact(counts.failed)} can't</p>
    ${counts.samples.map(
      (sample) => html`<div key=${sample.sequence}>
        <p class="hint">${jobName(sample)}</p>
        <${Lines} diff=${sample.difference} what=${`letter ${sample.sequence}`} />
      </div>`,
    )}
    ${notes.length > 0 && html`<ul class="notes">${notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>`}
  `;
}
