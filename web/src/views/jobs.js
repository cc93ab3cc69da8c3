/** The jobs and dead letters of a DAG run, or of one of its tasks, by queue. */

import { AirflowLink, runAddress, taskAddress } from "../airflow.js";
import { getJobs } from "../api.js";
import { NONE, counted, exact } from "../format.js";
import { Shown } from "../figure.js";
import { html } from "../html.js";
import { Ago, Badge, Empty, Loading, ServerState, PollError, allAnswer } from "../components.js";
import { usePoll } from "../polling.js";
import { groupsAddress, queueAddress } from "../routing.js";
import { asQuery } from "../selection.js";
import { useMe } from "../session.js";
import { Table } from "../table.js";

/** @import { Figure, TaskQueue } from "../api_types" */

const columns = [
  {
    key: "queue", label: "Queue", head: true,
    cell: (row) => html`<a class="name" href=${queueAddress(row.connection, row.queue)}>${row.queue}</a> <span class="aside">${row.connection}</span>`,
  },
  { key: "task", label: "Task", cell: (row) => html`<code>${row.task_id ?? NONE}${row.map_index >= 0 ? `[${row.map_index}]` : ""}</code>` },
  { key: "at", label: "Published", cell: (row) => html`<${Ago} time=${row.published_at} />` },
  { key: "jobs", label: "Jobs", numeric: true, cell: (row) => html`<${Shown} of=${row.published} show=${exact} />` },
  { key: "ended", label: "Ended", numeric: true, cell: (row) => ofTask(row, row.ended) },
  { key: "stored", label: "In the queue", numeric: true, hint: "Dead letters among them", cell: (row) => ofTask(row, row.stored) },
  { key: "letters", label: "Dead", numeric: true, cell: (row) => letters(row, row.letters, {}) },
  { key: "parked", label: "Parked", numeric: true, cell: (row) => letters(row, row.parked, { parked: true }) },
  { key: "state", label: "Task", cell: (row) => (row.closed == null ? NONE : row.closed ? "ended" : html`<${Badge} tone="info">waiting<//>`) },
];

/** Which jobs were a task's own isn't recorded once it has ended. @param {TaskQueue} row @param {Figure} number */
const ofTask = (row, number) =>
  number.value == null && row.closed
    ? html`<span class="aside" title="The task has ended: which of the queue's jobs were its own isn't recorded any more">not recorded</span>`
    : html`<${Shown} of=${number} show=${exact} />`;

/** @param {TaskQueue} row @param {Figure} number @param {object} extra of the selection */
function letters(row, number, extra) {
  const shown = html`<${Shown} of=${number} show=${exact} />`;
  if (!number.value) return shown;
  const to = groupsAddress(row.connection, row.queue, asQuery({ ...row.select, ...extra }));
  return html`<a class="number-bad" href=${to} aria-label=${counted(number.value, "letter")}>${shown}</a>`;
}

/** The jobs of the run or task in the address. */
export function JobsView({ query }) {
  const me = useMe();
  const poll = usePoll((signal) => getJobs(query, signal), me.refresh_seconds, query.toString());
  const jobs = poll.data;
  return html`
    <h1 class="title">Jobs of ${query.has("task_id") ? "this task" : "this run"}</h1>
    <p class="why"><${JobsOrigin} query=${query} /></p>
    <${PollError} poll=${poll} />
    ${!jobs && !poll.error && html`<${Loading} what="the jobs" />`}
    ${jobs?.connections.map((item) => html`<${ServerState} key=${item.connection} ...${item} />`)}
    ${jobs && jobs.scanning.length > 0 && html`<p class="hint" role="status">Still scanning dead letters of ${jobs.scanning.join(", ")}.</p>`}
    ${
      jobs &&
      (jobs.queues.length
        ? html`<div class="panel"><${Table} caption="Queues with jobs" columns=${columns} rows=${jobs.queues}
            rowKey=${(row) => [row.connection, row.queue, row.task_id, row.map_index].join("/")} /></div>`
        : !jobs.scanning.length && allAnswer(jobs.connections) && html`<${Empty} title="No jobs are known">
            It published no jobs, or the queues hold neither a record nor a dead letter of them any more.
          <//>`)
    }
  `;
}

function JobsOrigin({ query }) {
  const [dagId, runId, taskId] = ["dag_id", "run_id", "task_id"].map((name) => query.get(name));
  if (!taskId) return html`<${AirflowLink} to=${runAddress(dagId, runId)}>${dagId}<//> <span class="aside">${runId}</span>`;
  const index = query.has("map_index") ? Number(query.get("map_index")) : -1;
  const to = taskAddress({ dag_id: dagId, run_id: runId, task_id: taskId, map_index: index });
  return html`<${AirflowLink} to=${to}>${dagId}.${taskId}${index >= 0 ? `[${index}]` : ""}<//> <span class="aside">${runId}</span>`;
}
