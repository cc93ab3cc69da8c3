/** One queue: its numbers, the last hour, its consumers, limits and risks. */

import { Trend } from "../charts.js";
import { bytes, count, counted, duration, exact, percent, rate } from "../format.js";
import { html, useMemo } from "../html.js";
import { Badge, Facts, Loading, Meter, Notice } from "../components.js";
import { deadOf } from "../queue_state.js";
import { Table } from "../table.js";
import { QueueHead, useQueue } from "./queue_head.js";

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
  <${Notice} tone="warn" title="Risks">
    <ul class="notes">${risks.map((risk) => html`<li key=${risk}>${risk}</li>`)}</ul>
  <//>
`;

const Numbers = ({ numbers }) => {
  const uncertain = numbers.letters?.uncertain;
  return html`
    <dl class="tiles">
      <${Number} name="Pending" value=${count(numbers.pending)} note="never delivered" />
      <${Number} name="In flight" value=${count(numbers.in_flight)} note=${`${exact(numbers.redelivered)} redelivered`} />
      <${Number} name="Dead" value=${count(deadOf(numbers))} note=${uncertain ? `${exact(uncertain)} more may be dead` : "proved"} bad=${deadOf(numbers) > 0} />
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
    cell: (item) => html`<span class="name">${item.name}</span>${item.paused && html` <${Badge} tone="warn">paused<//>`}`,
  },
  { key: "filters", label: "Filters", cell: (item) => html`<code>${item.filters.join(", ")}</code>` },
  { key: "pending", label: "Pending", numeric: true, cell: (item) => exact(item.pending) },
  { key: "in_flight", label: "In flight", numeric: true, cell: (item) => exact(item.in_flight) },
  { key: "redelivered", label: "Redelivered", numeric: true, cell: (item) => exact(item.redelivered) },
  { key: "lag", label: "Lag", numeric: true, hint: "How far the last delivered job is behind the last stored one", cell: (item) => exact(item.lag) },
  { key: "rate", label: "Deliveries", numeric: true, cell: (item) => rate(item.deliveries_per_second) },
  { key: "pulls", label: "Workers", hint: "Open pull requests of workers", cell: (item) => html`<${Workers} consumer=${item} />` },
];

function Workers({ consumer }) {
  if (consumer.open_pulls) return counted(consumer.open_pulls, "open pull");
  if (consumer.in_flight) return "busy";
  return consumer.pending ? html`<${Badge} tone="bad">no open pull<//>` : "no open pull";
}

const Consumers = ({ consumers }) =>
  consumers.length
    ? html`<${Table} caption="Consumers" columns=${columns} rows=${consumers} rowKey=${(item) => item.name} />`
    : html`<p class="hint padded">No consumer: no worker can process its jobs. Provision the queue with one.</p>`;

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
    : html`<p class="hint panel padded">No limit is set: the queue may fill the server's disk.</p>`;

const Stream = ({ detail }) => html`
  <div class="panel padded">
    <${Facts}
      pairs=${[
        ["Subjects", html`<code>${detail.subjects.join(", ")}</code>`],
        ["Retention", detail.retention],
        ["Description", detail.description],
        ["Dead letter queue", detail.dead_letter_queue ?? "none: dead letters aren't captured"],
        ["Events", detail.events],
        ["Archive", detail.archive],
        ["Audit", detail.audit],
        ["Matching no filter", detail.numbers.undeliverable ? counted(detail.numbers.undeliverable, "job") : null],
        ["Scheduled", detail.numbers.schedules ? counted(detail.numbers.schedules, "job") : null],
      ]}
    />
  </div>
`;
