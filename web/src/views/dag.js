/** The dead letters of a DAG, over all queues and runs. */

import { AirflowLink, dagAddress } from "../airflow.js";
import { ActionButtons } from "../actions.js";
import { getGroups, getSnapshot } from "../api.js";
import { NONE, counted, exact, shortened } from "../format.js";
import { Shown, isOld, sizeOf, sumOf } from "../figure.js";
import { html } from "../html.js";
import { Ago, Empty, Loading, PollError, ServerState, allAnswer } from "../components.js";
import { usePoll } from "../polling.js";
import { lettersAddress, queueAddress } from "../routing.js";
import { asQuery } from "../selection.js";
import { Table } from "../table.js";

/** @import { ConnectionState, Group, QueueNumbers } from "../api_types" */
/** @typedef {Group & {connection: string, queue: string}} Row */

const SECONDS = 15;
/** Queues whose groups are requested at once. */
const AT_ONCE = 4;

/**
 * @param {string} dagId
 * @param {AbortSignal} signal
 * @returns {Promise<{connections: ConnectionState[], rows: Row[], unread: string[], old: string[]}>}
 */
async function lettersOf(dagId, signal) {
  const { connections } = await getSnapshot(signal);
  // Where nothing was dead before, something may be now.
  const mayHaveSome = ({ declared, dead }) => declared && (dead.value !== 0 || isOld(dead));
  const waiting = connections.flatMap((item) => item.queues).filter(mayHaveSome);
  const query = asQuery({ dag_id: dagId, group_by: ["task_id", "error_class"] });
  /** @type {Row[]} */
  const rows = [];
  /** @type {string[]} */
  const unread = [];
  /** @type {string[]} */
  const old = [];
  const next = async () => {
    for (let queue = waiting.shift(); queue; queue = waiting.shift()) await read(queue);
  };
  /** @param {QueueNumbers} numbers */
  const read = async ({ connection, queue }) => {
    try {
      const { groups, scan, total } = await getGroups(connection, queue, query, signal);
      rows.push(...groups.map((group) => ({ ...group, connection, queue })));
      if (!scan.scanned_at) unread.push(queue);
      else if (isOld(total)) old.push(queue);
    } catch (error) {
      if (signal.aborted || error.status === 401 || error.status === 403) throw error;
      unread.push(queue);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, next));
  rows.sort((a, b) => sizeOf(b.count) - sizeOf(a.count));
  return { connections, rows, unread, old };
}

/** @type {import("../table.js").Column[]} */
const columns = [
  {
    key: "count", label: "Letters", head: true,
    cell: (row) =>
      row.select
        ? html`<a class="number-bad" href=${lettersAddress(row.connection, row.queue, asQuery(row.select))}
            aria-label=${counted(sizeOf(row.count), "letter")}><${Shown} of=${row.count} show=${exact} /></a>`
        : html`<span class="number-bad"><${Shown} of=${row.count} show=${exact} /></span>`,
  },
  { key: "queue", label: "Queue", cell: (row) => html`<a href=${queueAddress(row.connection, row.queue)}>${row.queue}</a> <span class="aside">${row.connection}</span>` },
  { key: "task", label: "Task", cell: (row) => html`<code>${row.key.task_id ?? NONE}</code>` },
  { key: "error", label: "Error", wide: true, cell: (row) => html`<span class="error-text" title=${row.error_message ?? ""}>${shortened([row.key.error_class, row.error_message].filter(Boolean).join(": "), 160) || NONE}</span>` },
  { key: "act", label: "Act", wide: true, cell: (row) => html`<${ActionButtons} ...${row} actions=${["redrive", "park"]} what=${`${counted(sizeOf(row.count), "letter")} of ${row.queue}`} />` },
  { key: "first", label: "First", cell: (row) => html`<${Ago} time=${row.first_seen} />` },
  { key: "last", label: "Last", cell: (row) => html`<${Ago} time=${row.last_seen} />` },
];

/** All letters of the DAG, in each queue that has some. @param {{dagId: string, rows: Row[]}} props */
function AllLetters({ dagId, rows }) {
  const queues = new Map(rows.map(({ connection, queue }) => [`${connection}/${queue}`, { connection, queue, select: { dag_id: dagId } }]));
  const [first, ...others] = queues.values();
  const count = sumOf(rows.map((row) => row.count));
  return html`<div class="toolbar spread">
    <p class="number"><strong><${Shown} of=${count} show=${exact} /></strong> ${count.value === 1 ? "letter" : "letters"} in ${counted(queues.size, "queue")}</p>
    <${ActionButtons} ...${first} others=${others} actions=${["redrive", "park"]} what="all letters of this DAG" main=${true} />
  </div>`;
}

/** The DAG in the address. */
export function DagView({ query }) {
  const dagId = query.get("dag_id") ?? "";
  const poll = usePoll((signal) => lettersOf(dagId, signal), SECONDS, dagId);
  const found = poll.data;
  return html`
    <h1 class="title">Dead letters of this DAG</h1>
    <p class="why"><${AirflowLink} to=${dagAddress(dagId)}>${dagId}<//></p>
    <${PollError} poll=${poll} />
    ${!found && !poll.error && html`<${Loading} what="the dead letters" />`}
    ${found?.connections.map((item) => html`<${ServerState} key=${item.connection} ...${item} />`)}
    ${found && found.unread.length > 0 && html`<p class="hint" role="status">Not read yet: ${found.unread.join(", ")}.</p>`}
    ${found && found.old.length > 0 && html`<p class="hint" role="status">Being read again, since something has changed: ${found.old.join(", ")}.</p>`}
    ${
      found &&
      (found.rows.length
        ? html`<${AllLetters} ...${{ dagId, rows: found.rows }} />
            <div class="panel"><${Table} caption="Dead letters by queue and cause" columns=${columns} rows=${found.rows}
            rowKey=${(row) => JSON.stringify([row.connection, row.queue, row.key])} /></div>`
        : !found.unread.length && !found.old.length && allAnswer(found.connections) && html`<${Empty} title="No dead letters">No queue holds a dead letter that a task of this DAG published.<//>`)
    }
  `;
}
