/** The buttons for redrive, park, discard, its undo and requeue in place, and the action that waits for confirmation; confirmation.js is the dialog. */

import { html, useEffect, useState } from "./html.js";
import { useMe } from "./session.js";
import { isAgainst } from "./views/diagnosis.js";

/** @typedef {"redrive" | "park" | "in_place" | "discard" | "undo" | "edit"} Action */

/** @type {Record<Action, string>} */
export const LABELS = { redrive: "Redrive", park: "Park", in_place: "Requeue in place", discard: "Discard", undo: "Undo the discard", edit: "Edit and retry" };

/** @typedef {{connection: string, queue: string, select: object}} Target letters of one queue */

/**
 * An action that waits for confirmation.
 *
 * @typedef {object} PendingAction
 * @property {string} connection
 * @property {string} queue
 * @property {object} select
 * @property {Target[]} [others] letters of further queues
 * @property {Action} action
 * @property {Record<string, any>} [advice] what is known of the letters' cause
 * @property {string} [undo] the id of the redrive whose discarded letters come back
 */

/** @type {(PendingAction & {number: number}) | null} */
let pending = null;
let opened = 0;
const listeners = new Set();

/**
 * Open the dialog. The page holds it, not the row of the button, which a refresh may remove.
 *
 * @param {PendingAction} action
 */
export function openDialog(action) {
  // The close event of a dialog comes a moment later: the next one may be open by then, so each has a number.
  setPending({ ...action, number: ++opened });
}

/**
 * Close the dialog, unless another one was opened since.
 *
 * @param {number} number the dialog's
 */
export function closeDialog(number) {
  if (pending?.number === number) setPending(null);
}

function setPending(next) {
  pending = next;
  for (const listener of listeners) listener(next);
}

/** @returns {(PendingAction & {number: number}) | null} */
export function usePendingAction() {
  const [current, setCurrent] = useState(pending);
  useEffect(() => {
    listeners.add(setCurrent);
    return () => listeners.delete(setCurrent);
  }, []);
  return current;
}

const NO_SELECTION = "No filter selects exactly these letters: group by other fields to act on them.";

/**
 * The buttons that act on all letters of a selection.
 *
 * @param {object} props
 * @param {string} props.connection
 * @param {string} props.queue
 * @param {object | null} props.select `null` where no selection matches exactly these letters
 * @param {Target[]} [props.others] letters of further queues, on which it acts as well
 * @param {Action[]} props.actions
 * @param {string} props.what the letters, for screen readers
 * @param {boolean} [props.main] the main buttons of a view; those in rows are plainer
 * @param {Record<string, any>} [props.advice] what is known of the letters' cause
 * @param {string} [props.none] why there is no selection
 * @param {string} [props.undo] the id of the redrive whose discarded letters come back
 */
export function ActionButtons({ connection, queue, select, others, actions, what, main = false, advice, none = NO_SELECTION, undo }) {
  const me = useMe();
  const reason = !me.may_act
    ? `Your role may view but not act: acting requires the permission to trigger the DAG ${me.dag_id}.`
    : select === null && none;
  if (reason && !main) return me.may_act ? html`<span class="hint">${reason}</span>` : null;
  return html`
    <span class="act">
      ${actions.map(
        (action) => html`<button
          key=${action}
          type="button"
          class=${main && action === "redrive" && !isAgainst(advice) ? "primary" : ""}
          disabled=${Boolean(reason)}
          title=${reason || undefined}
          aria-label=${`${LABELS[action]} ${what}`}
          onClick=${() => openDialog({ connection, queue, select, others, action, advice, undo })}
        >
          ${LABELS[action]}…
        </button>`,
      )}
      ${reason && html`<span class="why-not">${reason}</span>`}
    </span>
  `;
}
