/** Totals of all queues, most urgent first. */

import { count, counted, isLow, rate } from "../format.js";
import { html } from "../html.js";
import { Shown, sizeOf, sumOf } from "../figure.js";
import { NEEDS_SOMEBODY } from "../queue_state.js";

/** @import { Figure, QueueNumbers } from "../api_types" */

/** @param {{queues: QueueNumbers[]}} props */
export function Tiles({ queues }) {
  /** @param {(queue: QueueNumbers) => Figure} of */
  const sum = (of) => sumOf(queues.map(of));
  const working = queues.filter((queue) => queue.state === "working").length;
  const stuck = queues.filter((queue) => queue.problem || NEEDS_SOMEBODY.has(queue.state)).length;
  const dead = sum((queue) => queue.dead);
  const uncertain = sum((queue) => queue.uncertain);
  const out = sum((queue) => queue.out_per_second);
  const into = sum((queue) => queue.in_per_second);
  const low = isLow(Math.max(sizeOf(out), sizeOf(into)));
  const flow = (value) => rate(value, low);
  const died = sum((queue) => queue.deaths_per_minute);
  return html`
    <dl class="tiles">
      <${Tile} name="Flowing" value=${html`<${Shown} of=${out} show=${flow} what="Jobs gone" />`}
        note=${html`<${Shown} of=${into} show=${flow} what="Jobs stored" dated=${false} /> in, ${counted(working, "queue")} working`} tone=${sizeOf(out) ? "good" : ""} />
      <${Tile} name="Queues that nobody serves" value=${stuck} note=${stuck ? "stuck, unserved or full" : "every queue with jobs is served"} tone=${stuck ? "bad" : ""} />
      <${Tile} name="Pending" value=${html`<${Shown} of=${sum((queue) => queue.pending)} what="Never delivered" />`}
        note=${html`<${Shown} of=${sum((queue) => queue.in_flight)} dated=${false} /> in flight`} />
      <${Tile} name="Dead letters" value=${html`<${Shown} of=${dead} what="Dead letters" />`} note=${html`<${DeadNote} ...${{ dead, uncertain, died }} />`} tone=${sizeOf(dead) ? "bad" : ""} />
      <${Tile} name="Parked" value=${html`<${Shown} of=${sum((queue) => queue.parked)} what="Parked letters" />`} note="out of circulation" />
    </dl>
  `;
}

/** @param {Record<"dead" | "uncertain" | "died", Figure>} props */
export function DeadNote({ dead, uncertain, died }) {
  const rest = sizeOf(uncertain)
    ? html`, <${Shown} of=${uncertain} dated=${false} /> more may be dead`
    : dead.certainty === "exact" && uncertain.certainty === "exact" && ", all proved";
  return html`<${Shown} of=${died} show=${perMinute} what="Died in the last five minutes" dated=${false} />${rest}`;
}

/** @param {number} value */
const perMinute = (value) => (value ? `${value < 10 ? Math.round(value * 10) / 10 : count(Math.round(value))} a minute died lately` : "none died lately");

const Tile = ({ name, value, note, tone = "" }) => html`
  <div class="tile ${tone}">
    <dt>${name}</dt>
    <dd><strong>${value}</strong><span>${note}</span></dd>
  </div>
`;
