/** Redrive, park, requeue in place: the buttons, and which dialog is open; `confirm.js` is what they open. */

import { html, useEffect, useState } from "./html.js";
import { useMe } from "./session.js";

/** @typedef {"redrive" | "park" | "in_place"} Action */

/** @type {Record<Action, string>} */
export const LABELS = { redrive: "Redrive", park: "Park", in_place: "Requeue in place" };

/**
 * What a person is about to do.
 *
 * @typedef {object} Intent
 * @property {string} connection
 * @property {string} queue
 * @property {object} select
 * @property {Action} action
 */

/** @type {(Intent & {number: number}) | null} */
let intent = null;
let intents = 0;
const listeners = new Set();

/**
 * Open the dialog. The page holds it, not the row of the button, which a refresh may take away.
 *
 * @param {Intent} next
 */
export function intend(next) {
  // The browser tells a moment later that a dialog was closed: somebody may have opened the next one by then.
  tell({ ...next, number: ++intents });
}

/**
 * Close the dialog, unless another one was opened since.
 *
 * @param {number} number the dialog's
 */
export function withdraw(number) {
  if (intent?.number === number) tell(null);
}

function tell(next) {
  intent = next;
  for (const listener of listeners) listener(next);
}

/** @returns {(Intent & {number: number}) | null} */
export function useIntent() {
  const [current, setCurrent] = useState(intent);
  useEffect(() => {
    listeners.add(setCurrent);
    return () => listeners.delete(setCurrent);
  }, []);
  return current;
}

/**
 * The buttons that act on all that a selection means.
 *
 * @param {object} props
 * @param {string} props.connection
 * @param {string} props.queue
 * @param {object | null} props.select `null` where no selection means just these letters
 * @param {Action[]} props.actions
 * @param {string} props.what the letters, for those who listen
 * @param {boolean} [props.main] the buttons that a view is about; where they repeat, they are plainer
 */
export function Act({ connection, queue, select, actions, what, main = false }) {
  const me = useMe();
  const reason = !me.may_act
    ? `Your role may look, but not act: that takes the permission to trigger the DAG ${me.dag_id}.`
    : select === null && "No filter means just these: group by something else to act on them.";
  if (reason && !main) return me.may_act ? html`<span class="hint">${reason}</span>` : null;
  return html`
    <span class="act">
      ${actions.map(
        (action) => html`<button
          key=${action}
          type="button"
          class=${main && action === "redrive" ? "primary" : ""}
          disabled=${Boolean(reason)}
          title=${reason || undefined}
          aria-label=${`${LABELS[action]} ${what}`}
          onClick=${() => intend({ connection, queue, select, action })}
        >
          ${LABELS[action]}…
        </button>`,
      )}
      ${reason && html`<span class="why-not">${reason}</span>`}
    </span>
  `;
}
