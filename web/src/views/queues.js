/** All queues: their states, rates and dead letters. */

import { getSnapshot } from "../api.js";
import { Sparkline } from "../charts.js";
import { counted, duration, exact, isLow, percent, rate } from "../format.js";
import { Shown, sizeOf } from "../figure.js";
import { html, useMemo, useRef } from "../html.js";
import { Ago, Empty, Loading, Meter, PollError, ServerState } from "../components.js";
import { usePoll } from "../polling.js";
import { dagLettersAddress, groupsAddress, queueAddress, replaceQuery, withChanges } from "../routing.js";
import { REASONS } from "../selection.js";
import { useMe } from "../session.js";
import { StateBadge, attention } from "../queue_state.js";
import { Table } from "../table.js";
import { Tiles } from "./tiles.js";

/** @import { NewestCause, QueueNumbers } from "../api_types" */

const columns = [
  { key: "state", label: "State", sortable: true, cell: (row) => html`<${StateBadge} numbers=${row} />` },
  { key: "queue", label: "Queue", sortable: true, head: true, cell: (row) => html`<${Name} row=${row} />` },
  {
    key: "pending", label: "Pending", sortable: true, wide: true, numeric: true, hint: "Never delivered; the line is the last hour",
    cell: (row) => html`<span class="with-spark">
      <${Sparkline} values=${row.pending_history} what="Pending" /><${Shown} of=${row.pending} dated=${false} />
    </span>`,
  },
  {
    key: "in_flight", label: "In flight", sortable: true, numeric: true, hint: "Delivered and not ended; redelivered ones in brackets",
    cell: (row) => html`<${Shown} of=${row.in_flight} dated=${false} />${
      sizeOf(row.redelivered) ? html` <span class="aside">(<${Shown} of=${row.redelivered} what="Redelivered" dated=${false} />)</span>` : ""
    }`,
  },
  { key: "dead", label: "Dead", sortable: true, numeric: true, hint: "Proved dead letters, and those that may be dead", cell: (row) => html`<${Dead} row=${row} />` },
  { key: "parked", label: "Parked", numeric: true, hint: "Taken out of circulation", cell: (row) => html`<${Parked} row=${row} />` },
  { key: "in", label: "In", numeric: true, hint: "Jobs stored", cell: (row) => html`<${Flow} row=${row} of=${row.in_per_second} />` },
  { key: "out", label: "Out", numeric: true, hint: "Jobs gone", cell: (row) => html`<${Flow} row=${row} of=${row.out_per_second} />` },
  { key: "oldest", label: "Oldest", sortable: true, numeric: true, hint: "Age of the oldest message, dead letters included", cell: (row) => html`<${Shown} of=${row.oldest_seconds} show=${duration} dated=${false} />` },
  {
    key: "workers", label: "Pulls", numeric: true, hint: "Open pull requests of workers, over all consumers",
    cell: (row) => html`<${Shown} of=${row.open_pulls} what=${counted(row.consumers.value, "consumer")} dated=${false} />`,
  },
  { key: "limit", label: "Limit", hint: "The nearest limit of the stream", cell: (row) => html`<${Limit} limits=${row.limits} />` },
];

const SORTS = {
  state: (row) => attention(row),
  queue: () => 0,
  pending: (row) => -sizeOf(row.pending),
  in_flight: (row) => -sizeOf(row.in_flight),
  dead: (row) => -sizeOf(row.dead),
  oldest: (row) => -sizeOf(row.oldest_seconds),
};

/** The start view; search, filter and order are in the address. */
export function QueuesView({ query }) {
  const me = useMe();
  const poll = usePoll(getSnapshot, me.refresh_seconds, "snapshot");
  const text = query.get("find") ?? "";
  const only = query.get("attention") === "yes";
  const sort = sortOf(query.get("sort"));
  const change = (changes) => replaceQuery(withChanges(query, changes));
  const panel = useRef(/** @type {HTMLElement | null} */ (null));
  const order = useRef(/** @type {string[]} */ ([]));
  const connections = poll.data?.connections ?? [];
  const all = useMemo(() => connections.flatMap((item) => item.queues), [connections]);
  const matching = all.filter((row) => row.queue.includes(text.trim()) && (!only || attention(row) < 3));
  // The order is kept while the pointer or the focus is on the table, so that rows don't move away.
  const held = panel.current?.matches(":hover, :focus-within") && order.current;
  const rows = sorted(matching, sort, held);
  order.current = rows.map(idOf);
  const onSort = (key) => {
    order.current = [];
    change({ sort: sort.key === key && sort.down ? `-${key}` : key });
  };
  return html`
    <h1 class="title">Queues</h1>
    <${PollError} poll=${poll} />
    ${connections.map(
      (item) => html`<${ServerState} key=${item.connection} connection=${item.connection} state=${item.state}
        problem=${item.problem} age=${item.queues.length ? item.age_seconds : null} />`,
    )}
    ${!poll.data && !poll.error && html`<${Loading} what="the queues" rows=${8} />`}
    ${poll.data && html`<${Tiles} queues=${all} />`}
    ${
      all.length > 0 &&
      html`
        <div class="toolbar">
          <input type="search" aria-label="Find a queue" placeholder="Find a queue" value=${text}
            onInput=${(event) => change({ find: event.currentTarget.value })} />
          <button type="button" aria-pressed=${only} onClick=${() => change({ attention: only ? null : "yes" })}>Needs attention</button>
          <span class="hint" role="status">${counted(rows.length, "queue")}</span>
        </div>
        <div class="panel" ref=${panel}>
          <${Table} caption="Queues" columns=${columns} rows=${rows} rowKey=${idOf} sort=${sort} onSort=${onSort}
            rowClass=${(row) => (stateOf(connections, row) === "up" ? undefined : "old")} />
          ${!rows.length && html`<${Empty} title="No queue matches">Clear the search, or show all queues.<//>`}
        </div>
      `
    }
    ${poll.data && !all.length && html`<${NoQueues} connections=${connections} />`}
  `;
}

/** @param {string | null} text such as `dead`, or `-dead` for the other direction */
export function sortOf(text) {
  const key = text?.replace("-", "") ?? "";
  return Object.hasOwn(SORTS, key) ? { key, down: !text?.startsWith("-") } : { key: "state", down: true };
}

const idOf = (row) => `${row.connection}/${row.queue}`;

const stateOf = (connections, row) => connections.find((item) => item.connection === row.connection)?.state;

function sorted(rows, { key, down }, held) {
  if (held?.length) {
    const positions = new Map(held.map((id, index) => [id, index]));
    const known = rows.filter((row) => positions.has(idOf(row)));
    const others = rows.filter((row) => !positions.has(idOf(row)));
    return [...known.sort((a, b) => positions.get(idOf(a)) - positions.get(idOf(b))), ...others];
  }
  const value = SORTS[key];
  const ordered = [...rows].sort((a, b) => value(a) - value(b) || idOf(a).localeCompare(idOf(b)));
  return down ? ordered : ordered.reverse();
}

const Name = ({ row }) => html`
  <a class="name" href=${queueAddress(row.connection, row.queue)}>${row.queue}</a>
  <span class="aside">${row.connection}</span>
  ${row.newest && html`<${Newest} cause=${row.newest} />`}
`;

/** What the newest dead letter died of, and whose it is. @param {{cause: NewestCause}} props */
const Newest = ({ cause }) => html`<span class="newest hint" title=${cause.error_place ?? undefined}>
  ${cause.error_class?.split(".").at(-1) ?? REASONS[cause.reason] ?? cause.reason} <${Ago} time=${cause.died_at} />${
    cause.dag_id && html`, <a href=${dagLettersAddress(cause.dag_id)} aria-label=${`Dead letters of the DAG ${cause.dag_id}`}>${cause.dag_id}</a>${cause.team && ` of team ${cause.team}`}`
  }
</span>`;

/** How many died in each five minutes of the last hour. @param {{counts: number[]}} props */
function Bars({ counts }) {
  const most = Math.max(...counts);
  return html`<span class="bars" role="img" aria-label=${`Died in the last hour: ${exact(counts.reduce((sum, count) => sum + count, 0))}`}
    title="Died in each five minutes of the last hour">${counts.map((count, index) => html`<i key=${index} style=${{ height: `${(100 * count) / most}%` }}></i>`)}</span>`;
}

/** Both rates of a row have the same unit. */
function Flow({ row, of }) {
  const low = isLow(Math.max(sizeOf(row.in_per_second), sizeOf(row.out_per_second)));
  return html`<${Shown} of=${of} show=${(value) => rate(value, low)} dated=${false} />`;
}

/** @param {{row: QueueNumbers}} props */
function Dead({ row }) {
  const { dead, uncertain } = row;
  const number = html`${row.deaths_of_hour.length > 0 && html`<${Bars} counts=${row.deaths_of_hour} />`}<${Shown} of=${dead} what=${row.declared ? "Dead letters" : "This queue has no dead letter queue"} />`;
  if (!row.declared || dead.value == null) return number;
  return html`<a class=${dead.value ? "number-bad" : "number-none"} href=${groupsAddress(row.connection, row.queue)}
    aria-label=${`${counted(dead.value, "dead letter")} of ${row.queue}`}>${number}</a>${
      sizeOf(uncertain) > 0 && html` <span class="aside">+<${Shown} of=${uncertain} what="May be dead; that isn't proved yet" dated=${false} />?</span>`
    }${sizeOf(row.deaths_per_minute) > 0 && html` <span class="aside"><${Shown} of=${row.deaths_per_minute} show=${(value) => `${exact(value)}/min`} what="Died in the last five minutes" dated=${false} /></span>`}`;
}

/** @param {{row: QueueNumbers}} props */
function Parked({ row }) {
  const number = html`<${Shown} of=${row.parked} dated=${false} />`;
  if (!row.parked.value) return number;
  return html`<a href=${groupsAddress(row.connection, row.queue, { parked: "true" })}
    aria-label=${`${counted(row.parked.value, "parked letter")} of ${row.queue}`}>${number}</a>`;
}

function Limit({ limits }) {
  const [nearest] = limits;
  if (!nearest) return html`<span class="aside">none</span>`;
  const label = `${nearest.name}: ${percent(nearest.share)} used`;
  return html`<span class="limit"><${Meter} share=${nearest.share} label=${label} /><span title=${label}>${percent(nearest.share)}</span></span>`;
}

function NoQueues({ connections }) {
  if (!connections.length) {
    return html`<${Empty} title="No NATS connection is shown">
      Add an Airflow connection of type <code>nats</code>; docs/monitor.md says how to choose which ones are shown.
    <//>`;
  }
  if (connections.every((item) => item.state !== "up")) return null;
  return html`<${Empty} title="No work queue yet">
    ${connections.map((item) => item.connection).join(", ")} has no stream with WorkQueue retention. Provision one with
    <code>JetStreamProvisionOperator</code>; it appears here automatically.
  <//>`;
}
