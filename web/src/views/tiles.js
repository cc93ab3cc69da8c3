/** Totals of all queues, most urgent first. */

import { count, counted, rate } from "../format.js";
import { html } from "../html.js";
import { NEEDS_SOMEBODY, deadOf } from "../queue_state.js";

const sum = (queues, of) => queues.reduce((total, queue) => total + (of(queue) ?? 0), 0);

/** @param {{queues: import("../api_types").QueueNumbers[]}} props */
export function Tiles({ queues }) {
  const working = queues.filter((queue) => queue.state === "working").length;
  const stuck = queues.filter((queue) => queue.problem || NEEDS_SOMEBODY.has(queue.state)).length;
  const dead = sum(queues, deadOf);
  const uncertain = sum(queues, (queue) => queue.letters?.uncertain);
  const out = sum(queues, (queue) => queue.out_per_second);
  const into = sum(queues, (queue) => queue.in_per_second);
  return html`
    <dl class="tiles">
      <${Tile} name="Flowing" value=${rate(out)} note=${`${rate(into)} in, ${counted(working, "queue")} working`} tone=${out ? "good" : ""} />
      <${Tile} name="Stuck" value=${stuck} note=${stuck ? "jobs that nobody can end" : "no queue is stuck"} tone=${stuck ? "bad" : ""} />
      <${Tile} name="Pending" value=${count(sum(queues, (queue) => queue.pending))} note=${`${count(sum(queues, (queue) => queue.in_flight))} in flight`} />
      <${Tile} name="Dead letters" value=${count(dead)} note=${uncertain ? `${count(uncertain)} more may be dead` : "all proved"} tone=${dead ? "bad" : ""} />
      <${Tile} name="Parked" value=${count(sum(queues, (queue) => queue.letters?.parked))} note="out of circulation" />
    </dl>
  `;
}

const Tile = ({ name, value, note, tone = "" }) => html`
  <div class="tile ${tone}">
    <dt>${name}</dt>
    <dd><strong>${value}</strong><span>${note}</span></dd>
  </div>
`;
