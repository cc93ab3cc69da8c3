/** One queue: what is wrong with it, its numbers, the last hour, its consumers, limits and risks. */

import { deathsOf } from "../chart_data.js";
import { Trend } from "../charts.js";
import { bytes, counted, duration, exact, isLow, percent, rate } from "../format.js";
import { Shown, sizeOf } from "../figure.js";
import { html, useMemo } from "../html.js";
import { Ago, Facts, Loading, Meter, Notice } from "../components.js";
import { State, toneOf, wordOf } from "../queue_state.js";
import { AccountPanel } from "./account.js";
import { ConsumerButtons } from "./consumer_pause.js";
import { Table } from "../table.js";
import { QueueHead, useQueue } from "./queue_head.js";
import { DeadNote } from "./tiles.js";

/** @import { ConsumerNumbers, Limit, QueueDetail, QueueNumbers, StateFinding } from "../api_types" */

const JOBS = [
  { key: "pending", label: "Pending", colour: "--line" },
  { key: "in_flight", label: "In flight", colour: "--line-good" },
  { key: "dead", label: "Dead", colour: "--line-bad", dash: [5, 3] },
];
const RATES = [
  { key: "in_per_second", label: "In", colour: "--line" },
  { key: "out_per_second", label: "Out", colour: "--line-good", dash: [5, 3] },
];
const DEATHS = [{ key: "count", label: "Died", colour: "--line-bad", stepped: true }];

/** The overview of one queue. */
export function QueueView({ connection, queue }) {
  const poll = useQueue(connection, queue);
  const detail = poll.data;
  const points = useMemo(() => detail?.history ?? [], [detail]);
  const span = useMemo(lastHour, [detail]);
  const deaths = useMemo(() => deathsOf(detail?.deaths ?? [], span), [detail]);
  return html`
    <${QueueHead} ...${{ connection, queue, poll }} tab="overview" />
    ${!detail && !poll.error && html`<${Loading} what="the queue" rows=${8} />`}
    ${
      detail &&
      html`
        ${detail.numbers.problem && html`<${Notice} tone="bad" title="Its numbers are missing">${detail.numbers.problem.message}<//>`}
        <${Findings} findings=${detail.numbers.findings} />
        ${detail.risks.length > 0 && html`<${Risks} risks=${detail.risks} />`}
        <${Numbers} numbers=${detail.numbers} />
        <div class="charts panel">
          <${Trend} title="Jobs" points=${points} lines=${JOBS} span=${span} />
          <${Trend} title="Flow" points=${points} lines=${RATES} asRate=${true} span=${span} />
          ${detail.deaths.length > 0 && html`<${Trend} title="Deaths" points=${detail.deaths} lines=${DEATHS} series=${deaths} height=${120} span=${span} />`}
        </div>
        <h2>Consumers</h2>
        <div class="panel"><${Consumers} ...${{ connection, queue, detail, reload: poll.reload }} /></div>
        <div class="columns">
          <section><h2>Limits</h2><${Limits} limits=${detail.numbers.limits} /></section>
          <section><h2>Stream</h2><${Stream} detail=${detail} /></section>
          <section><h2>Jobs that are gone</h2><${AccountPanel} ...${{ connection, queue }} /></section>
        </div>
      `
    }
  `;
}

/** @returns {[number, number]} */
const lastHour = () => [Date.now() / 1000 - 3600, Date.now() / 1000];

/** What is wrong, each with the numbers that show it. @param {{findings: StateFinding[]}} props */
const Findings = ({ findings }) =>
  findings.length > 0 &&
  html`<ul class="findings" aria-label="Findings">
    ${findings.map(
      (finding) => html`<li key=${`${finding.part}/${finding.name}/${finding.state}`} class=${toneOf(finding.state)}>
        <strong>${wordOf(finding.state)}</strong>
        ${finding.part !== "queue" && html` <span class="aside">${finding.part}</span> <code>${finding.name}</code>`}
        <span class="evidence">${finding.evidence}</span>
        ${finding.since && html` <span class="aside">since <${Ago} time=${finding.since} /></span>`}
      </li>`,
    )}
  </ul>`;

const Risks = ({ risks }) => html`
  <${Notice} tone="warn" title="Risks">
    <ul class="notes">${risks.map((risk) => html`<li key=${risk}>${risk}</li>`)}</ul>
  <//>
`;

/** @param {{numbers: QueueNumbers}} props */
const Numbers = ({ numbers }) => {
  const { dead, uncertain, in_per_second: into, out_per_second: out } = numbers;
  const low = isLow(Math.max(sizeOf(into), sizeOf(out)));
  const flow = (value) => rate(value, low);
  return html`
    <dl class="tiles">
      <${Tile} name="Pending" of=${numbers.pending} note="never delivered" />
      <${Tile} name="In flight" of=${numbers.in_flight} note=${html`<${Shown} of=${numbers.redelivered} dated=${false} /> redelivered`} />
      <${Tile} name="Dead" of=${dead} note=${html`<${DeadNote} ...${{ dead, uncertain, died: numbers.deaths_per_minute }} />`} bad=${sizeOf(dead) > 0} />
      <${Tile} name="Flow" of=${out} show=${flow} note=${html`<${Shown} of=${into} show=${flow} dated=${false} /> in`} />
      <${Tile} name="Oldest" of=${numbers.oldest_seconds} show=${duration}
        note=${html`<${Shown} of=${numbers.stored} show=${exact} dated=${false} /> stored, <${Shown} of=${numbers.bytes} show=${bytes} dated=${false} />`} />
    </dl>
  `;
};

const Tile = ({ name, of, show, note, bad = false }) => html`
  <div class="tile ${bad ? "bad" : ""}"><dt>${name}</dt><dd><strong><${Shown} of=${of} show=${show} what=${name} /></strong><span>${note}</span></dd></div>
`;

/** @returns {import("../table.js").Column[]} */
const columnsFor = ({ connection, queue, detail, reload }) => [
  {
    key: "name", label: "Consumer", head: true,
    cell: (item) => html`<span class="name">${item.name}</span>${
      item.partitions && html` <span class="aside">partition ${item.partition} of ${item.partitions}</span>`
    }`,
  },
  {
    key: "state", label: "State", wide: true,
    cell: (item) => html`<${State} state=${item.state} evidence=${item.evidence} />
      <span class="evidence hint">${item.evidence}${item.since && html`, since <${Ago} time=${item.since} />`}</span>`,
  },
  { key: "filters", label: "Filters", cell: (item) => html`<code>${item.filters.join(", ")}</code>` },
  { key: "pending", label: "Pending", numeric: true, cell: (item) => html`<${Shown} of=${item.pending} show=${exact} dated=${false} />` },
  {
    key: "in_flight", label: "In flight", numeric: true, hint: "Delivered and not ended, and the limit",
    cell: (item) => html`<${Shown} of=${item.in_flight} show=${exact} dated=${false} />${item.max_in_flight ? ` of ${exact(item.max_in_flight)}` : ""}`,
  },
  { key: "redelivered", label: "Redelivered", numeric: true, cell: (item) => html`<${Shown} of=${item.redelivered} show=${exact} dated=${false} />` },
  { key: "lag", label: "Lag", numeric: true, hint: "How far the last delivered job is behind the last stored one", cell: (item) => html`<${Shown} of=${item.lag} show=${exact} dated=${false} />` },
  { key: "rate", label: "Deliveries", numeric: true, cell: (item) => html`<${Shown} of=${item.deliveries_per_second} show=${(value) => rate(value)} dated=${false} />` },
  { key: "pulls", label: "Workers", hint: "Open pull requests of workers", cell: (item) => workers(item) },
  {
    key: "act", label: "Act", wide: true,
    cell: (item) => html`<${ConsumerButtons} ...${{ connection, queue, consumer: item, most: detail.max_pause_seconds, reload }} />`,
  },
];

/** @param {ConsumerNumbers} consumer */
function workers(consumer) {
  const words = (value) => (value ? counted(value, "open pull") : sizeOf(consumer.in_flight) ? "busy" : "no open pull");
  return html`<${Shown} of=${consumer.open_pulls} show=${words} dated=${false} />`;
}

/** @param {{connection: string, queue: string, detail: QueueDetail, reload: () => void}} props */
const Consumers = (props) =>
  props.detail.consumers.length
    ? html`<${Table} caption="Consumers" columns=${columnsFor(props)} rows=${props.detail.consumers} rowKey=${(item) => item.name} />`
    : html`<p class="hint padded">No consumer: no worker can process its jobs. Provision the queue with one.</p>`;

/** @type {Record<Limit["name"], [string, (value: number) => string]>} */
const LIMITS = { max_msgs: ["Messages", exact], max_bytes: ["Bytes", bytes], max_age: ["Age of the oldest", duration] };

/** @param {{limits: Limit[]}} props */
const Limits = ({ limits }) =>
  limits.length
    ? html`<ul class="limits panel">
        ${limits.map((limit) => {
          const [label, show] = LIMITS[limit.name] ?? [limit.name, exact];
          return html`<li key=${limit.name}>
            <span>${label} <code>${limit.name}</code></span>
            <${Meter} share=${limit.share} label=${`${percent(limit.share)} used`} />
            <span>${show(limit.used)} of ${show(limit.limit)}, ${percent(limit.share)}</span>
          </li>`;
        })}
      </ul>`
    : html`<p class="hint panel padded">No limit is set: the queue may fill the server's disk.</p>`;

/** @param {{detail: QueueDetail}} props */
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
        ["Matching no filter", sizeOf(detail.numbers.undeliverable) > 0 && html`<${Shown} of=${detail.numbers.undeliverable} show=${(value) => counted(value, "job")} />`],
        ["Scheduled", sizeOf(detail.numbers.schedules) > 0 && html`<${Shown} of=${detail.numbers.schedules} show=${(value) => counted(value, "job")} />`],
      ]}
    />
  </div>
`;
