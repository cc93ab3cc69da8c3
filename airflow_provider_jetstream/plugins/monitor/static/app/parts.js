/** Small parts that every view is made of. */

import { AirflowLink, loginAddress } from "./airflow.js";
import { ago, clock } from "./format.js";
import { html, useState } from "./html.js";

/** A word in a coloured frame. @param {{tone?: "good"|"bad"|"warn"|"info"|"plain"}} props */
export const Badge = ({ tone = "plain", title, children }) =>
  html`<span class="badge ${tone}" title=${title}>${children}</span>`;

/** A time as its distance, and the time itself where the pointer rests. */
export const Ago = ({ time }) =>
  time ? html`<time dateTime=${time} title=${clock(time)}>${ago(time)}</time>` : html`<span>–</span>`;

/** A message that stays in the flow of the page. */
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

/** What is shown where there is nothing to show, and what to do about it. */
export const Empty = ({ title, children }) => html`
  <div class="empty" role="status">
    <strong>${title}</strong>
    <div>${children}</div>
  </div>
`;

/** Room for what is on its way, as large as what comes. */
export const Loading = ({ what, rows = 4 }) => html`
  <div class="loading" role="status" aria-label=${`Loading ${what}`}>
    ${Array.from({ length: rows }, (_, row) => html`<div key=${row} class="bone"></div>`)}
  </div>
`;

/** An error, as something that a person can act on. */
export function Failure({ error, reload }) {
  if (error.status === 401) {
    return html`<${Notice} tone="warn" title="Your session has ended">
      <${AirflowLink} to=${loginAddress}>Log in again<//>, or reload Airflow.
    <//>`;
  }
  const again = html`<button type="button" onClick=${reload}>Try again</button>`;
  const title = {
    0: "Airflow is away",
    403: "You may not see this",
    404: "Nothing here",
    409: "This queue keeps no dead letters",
    503: "The NATS server is away",
  }[error.status];
  return html`<${Notice} tone=${error.passing ? "bad" : "warn"} title=${title ?? "This didn't work"} actions=${again}>
    ${error.message}
  <//>`;
}

/** An error beside what is known from before, or all there is. */
export const Stale = ({ poll }) => (poll.error ? html`<${Failure} error=${poll.error} reload=${poll.reload} />` : null);

/** A server that doesn't answer, and how old the numbers are that are shown meanwhile. */
export function ServerState({ connection, state, problem, age }) {
  if (state === "up") return null;
  if (state === "starting") {
    return html`<${Notice}>Connecting to ${connection}…<//>`;
  }
  return html`
    <${Notice} tone="bad" title=${`The server of ${connection} is away`}>
      <p>${problem?.message ?? "It doesn't answer."}</p>
      <p>
        ${age != null && `The numbers below were seen ${ago(new Date(Date.now() - age * 1000))}. `}The page goes on by
        itself when the server is back.
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
  // Without a secure origin browsers have no clipboard.
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

/** How much of a limit is used. */
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
