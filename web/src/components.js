/** Small components that all views use. */

import { REFUSALS } from "./api.js";
import { AirflowLink, loginAddress } from "./airflow.js";
import { ago, clock } from "./format.js";
import { useTrouble } from "./polling.js";
import { queuesAddress } from "./routing.js";
import { html, useEffect, useRef, useState } from "./html.js";

/** A word in a coloured frame. @param {{tone?: "good"|"bad"|"warn"|"info"|"plain", title?: string, children?: any}} props */
export const Badge = ({ tone = "plain", title, children }) =>
  html`<span class="badge ${tone}" title=${title}>${children}</span>`;

/** The time elapsed since a time; the time itself is its tooltip. */
export const Ago = ({ time }) =>
  time ? html`<time dateTime=${time} title=${clock(time)}>${ago(time)}</time>` : html`<span>–</span>`;

/** A message between other content. */
export function Notice({ tone = "info", title, children, actions }) {
  return html`
    <div class="notice ${tone}" role=${tone === "bad" ? "alert" : "status"}>
      <div>
        ${title && html`<strong>${title}</strong>`}
        <div>${children}</div>
      </div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </div>
  `;
}

/** A message in place of missing content, with what to do. */
export const Empty = ({ title, children }) => html`
  <div class="empty" role="status">
    <strong>${title}</strong>
    <div>${children}</div>
  </div>
`;

/** A placeholder of about the size of the content that is loading. */
export const Loading = ({ what, rows = 4 }) => html`
  <div class="loading" role="status" aria-label=${`Loading ${what}`}>
    ${Array.from({ length: rows }, (_, row) => html`<div key=${row} class="bone"></div>`)}
  </div>
`;

/** An error, with what the user can do. */
export function Failure({ error, reload }) {
  if (error.status === 401) {
    return html`<${Notice} tone="warn" title="Your session has ended">
      <${AirflowLink} to=${loginAddress}>Log in again<//>, or reload Airflow.
    <//>`;
  }
  const again = html`<button type="button" onClick=${reload}>Try again</button>`;
  const title = {
    0: "Airflow doesn't answer",
    403: "Not allowed",
    404: "Not found",
    409: "This queue has no dead letter queue",
    503: REFUSALS.has(error.code) ? "The NATS server refuses the page" : "The NATS server is away",
  }[error.status];
  if (error.code === "JS202" || error.code === "scanning") {
    return html`<${Notice} title="Still counting" actions=${again}>${error.message}<//>`;
  }
  return html`<${Notice} tone=${error.transient ? "bad" : "warn"} title=${title ?? "The request failed"} actions=${error.status === 404 ? null : again}>
    ${error.message}. ${error.status === 404 && html`<a href=${queuesAddress()}>All queues</a>`}
  <//>`;
}

/** The error of the last request, above the data of an earlier one if there is some. */
export function PollError({ poll }) {
  useTrouble(Boolean(poll.error));
  return poll.error ? html`<${Failure} error=${poll.error} reload=${poll.reload} />` : null;
}

/** @param {{state: string}[]} connections @returns {boolean} whether all servers answer, so that nothing found is nothing there */
export const allAnswer = (connections) => connections.every(({ state }) => state === "up");

/** Why a server's numbers aren't those of now, and their age. */
export function ServerState({ connection, state, problem, age }) {
  useTrouble(state === "away" || state === "refused");
  if (state === "up") return null;
  if (state === "starting") {
    return html`<${Notice}>Connecting to ${connection}…<//>`;
  }
  const refused = state === "refused";
  return html`
    <${Notice} tone="bad" title=${refused ? `The server of ${connection} refuses the page` : `The server of ${connection} is away`}>
      <p>${problem?.message ?? "It doesn't answer."}</p>
      <p>
        ${age != null && `The numbers below are from ${ago(new Date(Date.now() - age * 1000))}. `}${
          refused
            ? `This doesn't go away by itself: somebody has to change the Airflow connection ${connection}, or the user's rights on the server.`
            : "The page refreshes automatically when the server is back."
        }
      </p>
    <//>
  `;
}

/** A button that copies text. */
export function Copy({ text, what }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  // Browsers have no clipboard on an insecure origin.
  if (!navigator.clipboard) return null;
  return html`<button type="button" class="quiet" aria-label=${`Copy ${what}`} onClick=${copy}>
    ${done ? "Copied" : "Copy"}
  </button>`;
}

/** Names and values. @param {{pairs: [string, any][]}} props a pair without a value is left out */
export const Facts = ({ pairs }) => html`
  <dl class="facts">
    ${pairs
      .filter(([, value]) => value != null && value !== "" && value !== false)
      .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>
`;

/** The used share of a limit, as a bar. */
export function Meter({ share, label }) {
  const tone = share >= 0.9 ? "bad" : share >= 0.75 ? "warn" : "plain";
  return html`
    <span class="meter ${tone}" title=${label}>
      <span class="bar" aria-hidden="true">
        <span style=${{ width: `${Math.min(100, share * 100)}%` }}></span>
      </span>
    </span>
  `;
}

/** A dialog in front of the page. @param {{title: string, close: () => void, wide?: boolean, children?: any}} props */
export function Modal({ title, close, wide = false, children }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    dialog.current?.showModal();
    /** @type {HTMLElement | null | undefined} */ (dialog.current?.querySelector("input, select, textarea"))?.focus();
  }, []);
  return html`
    <dialog ref=${dialog} class="dialog ${wide ? "broad" : ""}" aria-label=${title} onClose=${close}>
      <h2>${title}</h2>
      ${children}
    </dialog>
  `;
}
