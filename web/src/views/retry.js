/** Retrying a job that waits for its next delivery, and giving it up. */

import { askForJob } from "../api.js";
import { clock } from "../format.js";
import { html, useState } from "../html.js";
import { Failure, Modal } from "../components.js";
import { useMe } from "../session.js";

/** @import { JobAttempt } from "../api_types" */
/** @import { ApiError } from "../api.js" */

/** @type {Record<"retry" | "give-up", [string, string]>} */
const ACTIONS = {
  retry: ["Retry now", "The server delivers it at once, as one of its deliveries."],
  "give-up": ["Give up", "It becomes a dead letter, with its error and your reason, and can be redriven."],
};

/** @param {JobAttempt | null} attempt whether it failed and its job waits, as far as the page knows */
const waits = (attempt) => attempt?.state === "failed" && !attempt.asked && attempt.waits_until != null && Date.parse(attempt.waits_until) > Date.now();

/** Both buttons, where the last attempt says that the job waits; the server of the page proves it before it acts.
 * @param {{connection: string, queue: string, sequence: number, name: string, attempt: JobAttempt | null, reload: () => void}} props */
export function RetryButtons({ connection, queue, sequence, name, attempt, reload }) {
  const me = useMe();
  const [open, setOpen] = useState(/** @type {"retry" | "give-up" | null} */ (null));
  if (attempt?.asked) return html`<span class="hint">${attempt.asked}</span>`;
  if (!me.may_act || !waits(attempt)) return null;
  return html`
    ${/** @type {const} */ (["retry", "give-up"]).map(
      (action) => html`<button key=${action} type="button" aria-label=${`${ACTIONS[action][0]}: job ${sequence}`} onClick=${() => setOpen(action)}>${ACTIONS[action][0]}…</button> `,
    )}
    ${open && html`<${RetryDialog} ...${{ connection, queue, sequence, name, attempt, reload, action: open, close: () => setOpen(null) }} />`}
  `;
}

function RetryDialog({ connection, queue, sequence, name, attempt, action, reload, close }) {
  const [error, setError] = useState(/** @type {ApiError | null} */ (null));
  const [sending, setSending] = useState(false);
  const [label, meaning] = ACTIONS[action];
  const confirm = async (event) => {
    event.preventDefault();
    const { why } = /** @type {Record<string, string>} */ (Object.fromEntries(new FormData(event.currentTarget)));
    setSending(true);
    try {
      await askForJob(connection, queue, sequence, action, why.trim() || null);
      reload();
      close();
    } catch (problem) {
      setError(problem);
      setSending(false);
    }
  };
  return html`
    <${Modal} title=${`${label}: ${name}`} close=${close}>
      <form onSubmit=${confirm}>
        <p>${meaning} By its worker it waits until ${clock(attempt.waits_until)}. A job that may be running is left alone.</p>
        <label>Why <span class="hint">stored with your name</span>
          <input name="why" autocomplete="off" maxlength="200" />
        </label>
        ${error && html`<${Failure} error=${error} reload=${() => setError(null)} />`}
        <div class="buttons">
          <button type="button" onClick=${close}>Cancel</button>
          <button type="submit" class="primary" disabled=${sending}>${label}</button>
        </div>
      </form>
    <//>
  `;
}
