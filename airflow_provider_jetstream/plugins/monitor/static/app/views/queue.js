/** One queue: its numbers, the last hour, its consumers, how near its limits are, and what could be lost. */

import { Trend } from "../charts.js";
import { bytes, count, counted, duration, exact, percent, rate } from "../format.js";
import { html, useMemo } from "../html.js";
import { Badge, Facts, Loading, Meter, Notice } from "../parts.js";
import { deadOf } from "../state.js";
import { Table } from "../table.js";
import { QueueHead, useQueue } from "./head.js";

const JOBS = [
  { key: "pending", label: "Pending", colour: "--line" },
  { key: "in_flight", label: "In flight", colour: "--line-good" },
  { key: "dead", label: "Dead", colour: "--line-bad", dash: [5, 3] },
];
const RATES = [
  { key: "in_per_second", label: "In", colour: "--line" },
  { key: "out_per_second", label: "Out", colour: "--line-good", dash: [5, 3] },
];

/** The overview of one queue. */
export function QueueView({ connection, queue }) {
  const poll = useQueue(connection, queue);
  const detail = poll.data;
  const points = useMemo(() => detail?.history ?? [], [detail]);
  return html`
    <${QueueHead} ...${{ connection, queue, poll }} tab="overview" />
    ${!detail && !poll.error && html`<${Loading} what="the queue" rows=${8} />`}
    ${
      detail &&
      html`
        ${detail.numbers.problem && html`<${Notice} tone="bad" title="Its numbers are missing">${detail.numbers.problem.message}<//>`}
        ${detail.risks.length > 0 && html`<${Risks} risks=${detail.risks} />`}
        <${Numbers} numbers=${detail.numbers} />
        <div class="charts panel">
          <${Trend} title="Jobs" points=${points} lines=${JOBS} />
          <${Trend} title="Flow" points=${points} lines=${RATES} asRate=${true} />
        </div>
        <h2>Consumers</h2>
        <div class="panel"><${Consumers} consumers=${detail.consumers} /></div>
        <div class="columns">
          <section><h2>Limits</h2><${Limits} limits=${detail.numbers.limits} /></section>
          <section><h2>Stream</h2><${Stream} detail=${detail} /></section>
        </div>
      `
    }
  `;
}

const Risks = ({ risks }) => html`
  <${Notice} tone="warn" title="What could be lost as things are">
    <ul class="notes">${risks.map((risk) => html`<li key=${risk}>${risk}</li>`)}</ul>
  <//>
`;

const Numbers = ({ numbers }) => {
  const uncertain = numbers.letters?.uncertain;
  return html`
    <dl class="tiles">
      <${Number} name="Pending" value=${count(numbers.pending)} note="never delivered" />
      <${Number} name="In flight" value=${count(numbers.in_flight)} note=${`${exact(numbers.redelivered)} redelivered`} />
      <${Number} name="Dead" value=${count(deadOf(numbers))} note=${uncertain ? `${exact(uncertain)} more may be dead` : "for certain"} bad=${deadOf(numbers) > 0} />
      <${Number} name="Flow" value=${rate(numbers.out_per_second)} note=${`${rate(numbers.in_per_second)} in`} />
      <${Number} name="Oldest" value=${duration(numbers.oldest_seconds)} note=${`${exact(numbers.stored)} stored, ${bytes(numbers.bytes)}`} />
    </dl>
  `;
};

const Number = ({ name, value, note, bad }) => html`
  <div class="tile ${bad ? "bad" : ""}"><dt>${name}</dt><dd><strong>${value}</strong><span>${note}</span></dd></div>
`;

const columns = [
  {
    key: "name", label: "Consumer", head: true,
    cell: (each) => html`<span class="name">${each.name}</span>${each.paused && html` <${Badge} tone="warn">paused<//>`}`,
  },
  { key: "filters", label: "Takes", cell: (each) => html`<code>${each.filters.join(", ")}</code>` },
  { key: "pending", label: "Pending", numeric: true, cell: (each) => exact(each.pending) },
  { key: "in_flight", label: "In flight", numeric: true, cell: (each) => exact(each.in_flight) },
  { key: "redelivered", label: "Redelivered", numeric: true, cell: (each) => exact(each.redelivered) },
  { key: "lag", label: "Lag", numeric: true, hint: "How far the last delivered job is behind the last stored one", cell: (each) => exact(each.lag) },
  { key: "rate", label: "Deliveries", numeric: true, cell: (each) => rate(each.deliveries_per_second) },
  { key: "pulls", label: "Workers", hint: "Open requests of workers for jobs", cell: (each) => html`<${Workers} consumer=${each} />` },
];

function Workers({ consumer }) {
  if (consumer.open_pulls) return counted(consumer.open_pulls, "open request");
  if (consumer.in_flight) return "busy";
  return consumer.pending ? html`<${Badge} tone="bad">none asks<//>` : "none asks";
}

const Consumers = ({ consumers }) =>
  consumers.length
    ? html`<${Table} caption="Consumers" columns=${columns} rows=${consumers} rowKey=${(each) => each.name} />`
    : html`<p class="hint padded">No consumer: nobody can do its jobs. Provision the queue with one.</p>`;

const LIMITS = { max_msgs: ["Messages", exact], max_bytes: ["Bytes", bytes], max_age: ["Age of the oldest", duration] };

const Limits = ({ limits }) =>
  limits.length
    ? html`<ul class="limits panel">
        ${limits.map(({ name, used, limit, share }) => {
          const [label, show] = LIMITS[name] ?? [name, exact];
          return html`<li key=${name}>
            <span>${label} <code>${name}</code></span>
            <${Meter} share=${share} label=${`${percent(share)} used`} />
            <span>${show(used)} of ${show(limit)}, ${percent(share)}</span>
          </li>`;
        })}
      </ul>`
    : html`<p class="hint panel padded">No limit is set: the queue grows as long as the server's disk lasts.</p>`;

const Stream = ({ detail }) => html`
  <div class="panel padded">
    <${Facts}
      pairs=${[
        ["Subjects", html`<code>${detail.subjects.join(", ")}</code>`],
        ["Retention", detail.retention],
        ["Description", detail.description],
        ["Dead letter queue", detail.dead_letter_queue ?? "none: deaths aren't kept"],
        ["Events", detail.events],
        ["Archive", detail.archive],
        ["Audit", detail.audit],
        ["Taken by no consumer", detail.numbers.undeliverable ? counted(detail.numbers.undeliverable, "job") : null],
        ["For later", detail.numbers.schedules ? counted(detail.numbers.schedules, "job") : null],
      ]}
    />
  </div>
`;
